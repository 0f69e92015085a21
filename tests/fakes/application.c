/*
 * The application's side of the fake driver: what a process calls that computes on the GPU.
 *
 * The GPU's memory is a file outside of the process (gpu.h), mapped shared where it is allocated: an image of the process does not
 * hold it. A checkpoint copies it to private memory, unmaps it, gives it back (zeroed) and closes every descriptor of the device
 * files; a restore takes as much on the GPU it is told, copies back to the same addresses and opens the files again. Requests come
 * over a socket pair to a thread (see libcuda.c); while the state is not RUNNING, calls of the application wait.
 *
 *   $VLLMSNAPSHOT_FAKE_DEV   where nvidia0, nvidiactl and nvidia-uvm are; /dev
 *
 * One GPU per process; one kernel, known by name, the PTX of tests/gpu/device.py.
 */
#define _GNU_SOURCE
#include "gpu.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define GRAIN (1UL << 16)
#define ALLOCATIONS 512

struct allocation {
	unsigned char *at, *copy;
	uint64_t size, offset;
};

static struct page *page;
static struct allocation allocations[ALLOCATIONS];
static struct table *table;
static int gpu = -1, files[2] = {-1, -1}, slot, ours = -1;
static uint64_t memory; /* bytes of the GPU */
static int retained; /* how often */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static __thread int current;

/* --- the GPU's file ------------------------------------------------------------------------------------------------ */

const char *device_file(const char *name)
{
	static __thread char text[4096];
	const char *base = getenv("VLLMSNAPSHOT_FAKE_DEV");

	snprintf(text, sizeof(text), "%s/%s", base ? base : "/dev", name);
	return text;
}

static const char *gpu_file(int minor)
{
	char name[32];

	snprintf(name, sizeof(name), "nvidia%d", minor);
	return device_file(name);
}

int visible(int minors[SLOTS])
{
	int count = 0;

	for (int minor = 0; minor < SLOTS; minor++)
		if (!access(gpu_file(minor), F_OK))
			minors[count++] = minor;
	return count;
}

static int byte_lock(int fd, int command, int byte, int type)
{
	struct flock lock = {.l_type = (short)type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};

	while (fcntl(fd, command, &lock))
		if (errno != EINTR)
			return -1;
	return lock.l_type;
}

static void table_lock(int fd)
{
	if (byte_lock(fd, F_OFD_SETLKW, 0, F_WRLCK) < 0)
		abort();
}

static void table_unlock(int fd)
{
	if (byte_lock(fd, F_OFD_SETLK, 0, F_UNLCK) < 0)
		abort();
}

int gpu_memory(int fd, uint64_t *total, uint64_t *used)
{
	static struct table copy;
	static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
	struct stat info;
	int result = -1;

	pthread_mutex_lock(&one);
	if (!fstat(fd, &info) && pread(fd, &copy, sizeof(copy), 0) == sizeof(copy)) {
		*total = (uint64_t)info.st_size - TABLE;
		*used = 0;
		for (int i = 0; i < SPANS; i++)
			/* Its own lock a process does not see: it is alive. */
			if (copy.spans[i].used && ((fd == gpu && copy.spans[i].slot == (uint32_t)slot) ||
						   byte_lock(fd, F_OFD_GETLK, (int)copy.spans[i].slot, F_WRLCK) != F_UNLCK))
				*used += copy.spans[i].size;
		result = 0;
	}
	pthread_mutex_unlock(&one);
	return result;
}

/* A GPU loses what nobody owns. */
static void give_back(struct span *span)
{
	if (fallocate(gpu, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(TABLE + span->offset), (off_t)span->size))
		abort();
	memset(span, 0, sizeof(*span));
}

/* Spans of processes that have died. Under the lock. */
static void reap(void)
{
	for (int i = 0; i < SPANS; i++) {
		struct span *span = &table->spans[i];

		if (span->used && span->slot != (uint32_t)slot && byte_lock(gpu, F_OFD_GETLK, (int)span->slot, F_WRLCK) == F_UNLCK)
			give_back(span);
	}
}

/* First fit; -1: no room. */
static int64_t take(uint64_t size)
{
	struct span *found = NULL;
	uint64_t at = 0;
	int again = 1;

	table_lock(gpu);
	reap();
	while (again) {
		again = 0;
		for (int i = 0; i < SPANS; i++) {
			struct span *span = &table->spans[i];

			if (!span->used)
				found = span;
			else if (at < span->offset + span->size && span->offset < at + size) {
				at = span->offset + span->size;
				again = 1;
			}
		}
	}
	if (found && at + size <= memory) {
		*found = (struct span){.slot = (uint32_t)slot, .used = 1, .offset = at, .size = size};
		page->bytes += size;
	} else {
		found = NULL;
	}
	table_unlock(gpu);
	return found ? (int64_t)at : -1;
}

static void drop(uint64_t offset)
{
	table_lock(gpu);
	for (int i = 0; i < SPANS; i++)
		if (table->spans[i].used && table->spans[i].slot == (uint32_t)slot && table->spans[i].offset == offset) {
			page->bytes -= table->spans[i].size;
			give_back(&table->spans[i]);
		}
	table_unlock(gpu);
}

static void close_gpu(void)
{
	if (table)
		munmap(table, TABLE);
	for (int i = 0; i < 2; i++)
		if (files[i] >= 0)
			close(files[i]);
	if (gpu >= 0)
		close(gpu);
	table = NULL;
	gpu = files[0] = files[1] = -1;
}

static int open_gpu(int minor)
{
	struct stat info;

	gpu = open(gpu_file(minor), O_RDWR | O_CLOEXEC);
	if (gpu < 0 || fstat(gpu, &info) || info.st_size < TABLE) {
		close_gpu();
		return NO_DEVICE;
	}
	memory = (uint64_t)info.st_size - TABLE;
	table = mmap(NULL, TABLE, PROT_READ | PROT_WRITE, MAP_SHARED, gpu, 0);
	if (table == MAP_FAILED)
		abort();
	table_lock(gpu);
	for (slot = 1; slot < SLOTS && byte_lock(gpu, F_OFD_SETLK, slot, F_WRLCK) < 0; slot++)
		;
	/* What a dead process of this slot has left. */
	for (int i = 0; i < SPANS; i++)
		if (table->spans[i].used && table->spans[i].slot == (uint32_t)slot)
			give_back(&table->spans[i]);
	table_unlock(gpu);
	files[0] = open(device_file("nvidiactl"), O_RDWR | O_CLOEXEC);
	files[1] = open(device_file("nvidia-uvm"), O_RDWR | O_CLOEXEC);
	if (slot == SLOTS || files[0] < 0) {
		close_gpu();
		return NO_DEVICE;
	}
	page->minor = minor;
	return SUCCESS;
}

static void map(const struct allocation *a)
{
	if (mmap(a->at, a->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, gpu, (off_t)(TABLE + a->offset)) == MAP_FAILED ||
	    madvise(a->at, a->size, MADV_DONTFORK))
		abort();
}

/* Keeps the addresses. */
static void unmap(const struct allocation *a)
{
	if (mmap(a->at, a->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
		abort();
}

/* --- requests of the driver's side ----------------------------------------------------------------------------------- */

/* A byte in the middle of the largest allocation. */
static void spoil(void)
{
	struct allocation *largest = allocations;

	for (struct allocation *a = allocations; a < allocations + ALLOCATIONS; a++)
		if (a->at && (!largest->at || a->size > largest->size))
			largest = a;
	if (largest->at)
		(largest->copy ? largest->copy : largest->at)[largest->size / 2] ^= 1;
}

static int checkpoint(int lose)
{
	struct allocation *a, *end = allocations + ALLOCATIONS;

	for (a = allocations; a < end; a++)
		if (a->at) {
			a->copy = mmap(NULL, a->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
			if (a->copy == MAP_FAILED)
				abort();
			memcpy(a->copy, a->at, a->size);
		}
	if (lose)
		spoil();
	for (a = allocations; a < end; a++)
		if (a->at) {
			unmap(a);
			drop(a->offset);
		}
	close_gpu();
	page->state = CHECKPOINTED;
	return SUCCESS;
}

static int restore(const struct request *request)
{
	struct allocation *a, *end = allocations + ALLOCATIONS;
	int minor = page->minor, result;

	if (request->paired) {
		if (request->pair[15] != minor)
			return INVALID_VALUE;
		minor = request->pair[31];
	}
	result = open_gpu(minor);
	if (result)
		return result;
	for (a = allocations; a < end; a++)
		if (a->at) {
			int64_t offset = take(a->size);

			if (offset < 0) {
				while (a-- > allocations)
					if (a->at)
						drop(a->offset);
				close_gpu();
				return OUT_OF_MEMORY;
			}
			a->offset = (uint64_t)offset;
		}
	for (a = allocations; a < end; a++)
		if (a->at) {
			map(a);
			memcpy(a->at, a->copy, a->size);
			munmap(a->copy, a->size);
			a->copy = NULL;
		}
	if (request->lose)
		spoil();
	page->state = LOCKED;
	return SUCCESS;
}

static int attend(const struct request *request)
{
	static const int from[] = {[LOCK] = RUNNING, [CHECKPOINT] = LOCKED, [RESTORE] = CHECKPOINTED, [UNLOCK] = LOCKED};

	if (request->op == BREAK) {
		page->state = FAILED;
		pthread_cond_broadcast(&changed);
		return SUCCESS;
	}
	if (page->state != from[request->op])
		return ILLEGAL_STATE;
	switch (request->op) {
	case LOCK:
		/* No call runs: each has the mutex. */
		page->state = LOCKED;
		return SUCCESS;
	case CHECKPOINT:
		return checkpoint(request->lose);
	case RESTORE:
		return restore(request);
	default:
		page->state = RUNNING;
		pthread_cond_broadcast(&changed);
		return SUCCESS;
	}
}

static void *serve(void *unused)
{
	struct request request;
	ssize_t length;

	prctl(PR_SET_NAME, "cuda-restore");
	while ((length = recv(ours, &request, sizeof(request), 0)) == sizeof(request) || (length < 0 && errno == EINTR))
		if (length > 0) {
			struct answer answer = {.number = request.number};

			pthread_mutex_lock(&mutex);
			answer.result = attend(&request);
			pthread_mutex_unlock(&mutex);
			while (send(ours, &answer, sizeof(answer), MSG_NOSIGNAL) < 0 && errno == EINTR)
				;
		}
	return unused;
}

/* Become a process that the driver knows. */
static void announce(void)
{
	sigset_t all, before;
	pthread_t thread;
	int pair[2];

	if (page)
		return;
	page = mmap((void *)PAGE_AT, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	if (page != (void *)PAGE_AT || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
		abort();
	ours = pair[0];
	*page = (struct page){.pid = getpid(), .socket = pair[1], .state = RUNNING};
	/* Signals are the application's own threads' business. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	if (pthread_create(&thread, NULL, serve, NULL))
		abort();
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_detach(thread);
}

/* --- calls of the application ---------------------------------------------------------------------------------------- */

/* Wait until calls may run. With the mutex held on success, until `leave`: calls are short, and one at a time is enough. */
static int enter(void)
{
	if (!page || page->pid != getpid())
		return NOT_INITIALIZED;
	pthread_mutex_lock(&mutex);
	while (page->state != RUNNING && page->state != FAILED)
		pthread_cond_wait(&changed, &mutex);
	if (page->state == FAILED || !retained || !current) {
		int result = page->state == FAILED ? UNKNOWN : INVALID_CONTEXT;

		pthread_mutex_unlock(&mutex);
		return result;
	}
	return SUCCESS;
}

static int leave(int result)
{
	pthread_mutex_unlock(&mutex);
	return result;
}

/* The allocation that holds all of these bytes. */
static struct allocation *holding(uint64_t at, uint64_t size)
{
	for (struct allocation *a = allocations; a < allocations + ALLOCATIONS; a++)
		if (a->at && (uint64_t)a->at <= at && at + size <= (uint64_t)a->at + a->size)
			return a;
	return NULL;
}

int cuDeviceGetCount(int *count)
{
	int minors[SLOTS];

	*count = visible(minors);
	return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal)
{
	int minors[SLOTS];

	*device = ordinal;
	return ordinal >= 0 && ordinal < visible(minors) ? SUCCESS : INVALID_DEVICE;
}

int cuDeviceGetName(char *name, int length, int device)
{
	(void)device;
	snprintf(name, (size_t)length, "Fake H200");
	return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
	(void)device;
	*value = attribute == 75 ? 9 : 0; /* compute capability 9.0 */
	return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
	int minors[SLOTS], result = SUCCESS;

	if (device < 0 || device >= visible(minors))
		return INVALID_DEVICE;
	if (page && page->pid != getpid())
		return NOT_INITIALIZED; /* a forked child */
	pthread_mutex_lock(&mutex);
	announce();
	if (!retained || page->minor != minors[device])
		result = retained ? INVALID_DEVICE : open_gpu(minors[device]);
	if (!result) {
		retained++;
		page->magic = MAGIC;
		*context = page;
	}
	pthread_mutex_unlock(&mutex);
	return result;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
	int result = enter();

	(void)device;
	if (result)
		return result;
	if (!--retained) {
		for (struct allocation *a = allocations; a < allocations + ALLOCATIONS; a++)
			if (a->at) {
				drop(a->offset);
				munmap(a->at, a->size);
				a->at = NULL;
			}
		close_gpu();
		page->magic = 0;
	}
	return leave(SUCCESS);
}

int cuCtxSetCurrent(void *context)
{
	current = context != NULL;
	return SUCCESS;
}

int cuCtxSynchronize(void)
{
	int result = enter();

	return result ? result : leave(SUCCESS);
}

int cuMemGetInfo_v2(size_t *available, size_t *total)
{
	uint64_t all = 0, used = 0;
	int result = enter();

	if (result)
		return result;
	if (gpu_memory(gpu, &all, &used))
		result = UNKNOWN;
	*total = all;
	*available = all - used;
	return leave(result);
}

int cuMemAlloc_v2(uint64_t *at, size_t size)
{
	struct allocation *a = allocations;
	int64_t offset;
	int result = enter();

	if (result)
		return result;
	size = (size + GRAIN - 1) & ~(GRAIN - 1);
	while (a < allocations + ALLOCATIONS && a->at)
		a++;
	if (!size)
		return leave(INVALID_VALUE);
	offset = a < allocations + ALLOCATIONS ? take(size) : -1;
	if (offset < 0)
		return leave(OUT_OF_MEMORY);
	*a = (struct allocation){.size = size, .offset = (uint64_t)offset};
	a->at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (a->at == MAP_FAILED)
		abort();
	map(a);
	*at = (uint64_t)a->at;
	return leave(SUCCESS);
}

int cuMemFree_v2(uint64_t at)
{
	struct allocation *a;
	int result = enter();

	if (result)
		return result;
	a = holding(at, 1);
	if (!a || (uint64_t)a->at != at)
		return leave(INVALID_VALUE);
	drop(a->offset);
	munmap(a->at, a->size);
	a->at = NULL;
	return leave(SUCCESS);
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size)
{
	int result = enter();

	if (result)
		return result;
	if (!holding(to, size))
		return leave(INVALID_VALUE);
	memcpy((void *)to, from, size);
	return leave(SUCCESS);
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size)
{
	int result = enter();

	if (result)
		return result;
	if (!holding(from, size))
		return leave(INVALID_VALUE);
	memcpy(to, (const void *)from, size);
	return leave(SUCCESS);
}

int cuMemAllocHost_v2(void **at, size_t size)
{
	*at = malloc(size);
	return *at ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemFreeHost(void *at)
{
	free(at);
	return SUCCESS;
}

int cuModuleLoadData(void **module, const void *image)
{
	int result = enter();

	if (result)
		return result;
	if (!strstr(image, ".version") || !strstr(image, ".entry vllmsnapshot_mix("))
		return leave(INVALID_IMAGE);
	*module = page;
	return leave(SUCCESS);
}

int cuModuleGetFunction(void **function, void *module, const char *name)
{
	if (module != page || strcmp(name, "vllmsnapshot_mix"))
		return NOT_FOUND;
	*function = module;
	return SUCCESS;
}

int cuLaunchKernel(void *function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,
		   unsigned int block_y, unsigned int block_z, unsigned int shared, void *stream, void **arguments, void **extra)
{
	uint64_t at;
	uint32_t count, first, key, *words;
	int result = enter();

	if (result)
		return result;
	if (function != page || grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || block_x > 1024 || shared || stream || extra)
		return leave(INVALID_VALUE);
	at = *(uint64_t *)arguments[0];
	count = *(uint32_t *)arguments[1];
	first = *(uint32_t *)arguments[2];
	key = *(uint32_t *)arguments[3];
	if (count > (uint64_t)grid_x * block_x)
		count = grid_x * block_x;
	if (!holding(at, 4UL * count))
		return leave(INVALID_VALUE);
	words = (uint32_t *)at;
	for (uint32_t i = 0; i < count; i++)
		words[i] = (words[i] << 5 | words[i] >> 27) ^ (first + i) ^ key;
	return leave(SUCCESS);
}
