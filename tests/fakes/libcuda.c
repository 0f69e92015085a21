/*
 * The NVIDIA driver as the agent sees it: the symbols of libcuda and libnvidia-ml that agent/driver.py calls, and no other.
 * What applications call is in application.c; both are one library. What it knows is below $VLLMSNAPSHOT_FAKE_GPU, so that several
 * processes see one driver. A process is one of two:
 *
 * An application that uses the GPU through this library, in whatever namespaces. Its state is in the process itself, found by PID;
 * calls go to a thread of it over a socket that pidfd_getfd brings here. Needs the right to trace it.
 *
 *   gpuN           a GPU: its memory and who has how much of it (gpu.h). Containers have it mounted as /dev/nvidiaN, and the
 *   nvidiactl      two others under their names. Make them by `make_gpus`. No environment there; the library has to be called
 *   nvidia-uvm     libcuda.so.1 and to be found (LD_LIBRARY_PATH).
 *
 * A name in files, for tests that need no process:
 *
 *   state/PID    CUprocessState
 *   used/PID     bytes on device 0 (optional)
 *   proc/PID/fd  nvidia* links there go away with a checkpoint and come back with a restore; not 77, which is NVML's
 *
 * A PID that is neither does not use CUDA. For both:
 *
 *   config       NAME=VALUE lines: driver, api, count, name, mig, virtual, compute, free; see `config`
 *   control      lines "CALL NTH KIND [NUMBER]": what happens at the nth call of that name (0: at every one). KIND is
 *                  error N    fail with N, nothing changes          late N    fail with N, though it has been done
 *                  stay       succeed, nothing changes              state N   succeed, the state is N afterwards
 *                  hang       never return, nothing changes         hung      never return, though it has been done
 *                  die        the caller ends                       slow N    done N milliseconds later
 *                  lose       done, but for one byte of the memory
 *                An application gets into no state without what belongs to it: there, `state N` is the call itself where that leads
 *                to N, makes it FAILED where N is that, and else is `stay`.
 *   hangs        a FIFO that gets a byte from every call that never returns
 *   calls        a line for every call of cuCheckpointProcess*: NAME PID [OLD NEW]
 */
#define _GNU_SOURCE
#include "gpu.h"
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define DIRECTORY "VLLMSNAPSHOT_FAKE_GPU"

enum { NVML_UNINITIALIZED = 1, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3 };

static int initialized;

static const char *path(const char *name)
{
	static char text[4][4096];
	static int next;
	char *to = text[next++ & 3];
	const char *base = getenv(DIRECTORY);

	snprintf(to, 4096, "%s/%s", base ? base : "/nonexistent", name);
	return to;
}

static const char *of_pid(const char *kind, int pid)
{
	char name[64];

	snprintf(name, sizeof(name), "%s/%d", kind, pid);
	return path(name);
}

static long number(const char *file, long missing)
{
	FILE *f = fopen(file, "r");
	long value = missing;

	if (!f)
		return missing;
	if (fscanf(f, "%ld", &value) != 1)
		value = missing;
	fclose(f);
	return value;
}

static void write_number(const char *file, long value)
{
	FILE *f = fopen(file, "w");

	if (!f)
		abort();
	fprintf(f, "%ld\n", value);
	fclose(f);
}

static const char *config(const char *name, const char *missing)
{
	static char lines[4][256];
	static int next;
	char *line = lines[next++ & 3];
	FILE *f = fopen(path("config"), "r");
	size_t length = strlen(name);

	while (f && fgets(line, 256, f)) {
		line[strcspn(line, "\n")] = 0;
		if (!strncmp(line, name, length) && line[length] == '=') {
			fclose(f);
			return line + length + 1;
		}
	}
	if (f)
		fclose(f);
	return missing;
}

static int lock_all(void)
{
	int fd = open(path("lock"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);

	if (fd < 0 || flock(fd, LOCK_EX))
		abort();
	return fd;
}

/* What is to happen at this call; counts it. */
static void plan(const char *call, char kind[16], long *value)
{
	char name[64], line[256], which[64];
	long count, nth;
	FILE *f;

	snprintf(name, sizeof(name), "count.%s", call);
	count = number(path(name), 0) + 1;
	write_number(path(name), count);
	strcpy(kind, "");
	*value = 0;
	f = fopen(path("control"), "r");
	while (f && fgets(line, sizeof(line), f)) {
		char found[16] = "";
		long with = 0;

		if (sscanf(line, "%63s %ld %15s %ld", which, &nth, found, &with) >= 3 && !strcmp(which, call) && (!nth || nth == count)) {
			strcpy(kind, found);
			*value = with;
			break;
		}
	}
	if (f)
		fclose(f);
}

/* Tells whoever reads the FIFO, so that a test need not wait for the time to end. */
static void hang(void)
{
	int fd = open(path("hangs"), O_WRONLY | O_NONBLOCK | O_CLOEXEC);

	if (fd >= 0 && write(fd, "x", 1) != 1)
		abort();
	for (;;)
		pause();
}

/* A checkpoint closes the descriptors of the driver, a restore opens them again. */
static void move_descriptors(int pid, const char *from, const char *to)
{
	char a[512], b[512], source[5120], target[5120], link[256];
	DIR *dir;
	struct dirent *entry;
	ssize_t length;

	snprintf(a, sizeof(a), "proc/%d/%s", pid, from);
	snprintf(b, sizeof(b), "proc/%d/%s", pid, to);
	dir = opendir(path(a));
	while (dir && (entry = readdir(dir))) {
		snprintf(source, sizeof(source), "%s/%s", path(a), entry->d_name);
		snprintf(target, sizeof(target), "%s/%s", path(b), entry->d_name);
		length = readlink(source, link, sizeof(link) - 1);
		if (strcmp(entry->d_name, "77") && length > 0 && !strncmp(link, "/dev/nvidia", 11) && rename(source, target))
			abort();
	}
	if (dir)
		closedir(dir);
}

static void note(const char *call, int pid, const unsigned char *pair)
{
	FILE *f = fopen(path("calls"), "a");
	int i;

	fprintf(f, "%s %d", call, pid);
	for (i = 0; pair && i < 32; i++)
		fprintf(f, "%s%02x", i % 16 ? "" : " ", pair[i]);
	fprintf(f, "\n");
	fclose(f);
}

/* --- applications ------------------------------------------------------------------------------------------------ */

/* The page of a process that uses the GPU through application.c; whether there is one. */
static int find(int pid, struct page *page)
{
	char name[64], line[256];
	int fd, inner = 0;
	ssize_t length;
	FILE *f;

	snprintf(name, sizeof(name), "/proc/%d/mem", pid);
	fd = open(name, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	length = pread(fd, page, sizeof(*page), PAGE_AT);
	close(fd);
	if (length != sizeof(*page) || page->magic != MAGIC)
		return 0;
	snprintf(name, sizeof(name), "/proc/%d/status", pid);
	f = fopen(name, "r");
	while (f && fgets(line, sizeof(line), f))
		if (!strncmp(line, "NSpid:", 6))
			inner = atoi(strrchr(line, '\t') + 1);
	if (f)
		fclose(f);
	return inner == page->pid;
}

/* Have the application do it. Waits as long as that takes, or until it ends. */
static int tell(int pid, const struct page *page, struct request request)
{
	int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	int fd = pidfd < 0 ? -1 : (int)syscall(SYS_pidfd_getfd, pidfd, page->socket, 0);
	struct answer answer = {.result = UNKNOWN};
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	request.number = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
	if (fd >= 0 && send(fd, &request, sizeof(request), MSG_NOSIGNAL) == sizeof(request))
		while (answer.number != request.number) {
			/* Answers to callers that are gone may come first. */
			struct pollfd both[] = {{.fd = fd, .events = POLLIN}, {.fd = pidfd, .events = POLLIN}};

			if (poll(both, 2, -1) < 0 || (both[1].revents & POLLIN))
				break;
			if (recv(fd, &answer, sizeof(answer), MSG_DONTWAIT) != sizeof(answer))
				answer.number = 0;
		}
	if (answer.number != request.number)
		answer.result = UNKNOWN;
	if (fd >= 0)
		close(fd);
	if (pidfd >= 0)
		close(pidfd);
	return answer.result;
}

static int change_application(int pid, int op, int to, const char *kind, long value, const unsigned char *pair)
{
	struct request request = {.op = op, .lose = !strcmp(kind, "lose")};
	struct page page;
	int result;

	if (!find(pid, &page))
		return NOT_INITIALIZED;
	if (!strcmp(kind, "stay") || !strcmp(kind, "hang") || (!strcmp(kind, "state") && value != to && value != FAILED))
		return SUCCESS;
	if (!strcmp(kind, "state") && value == FAILED)
		request.op = BREAK;
	if (pair) {
		request.paired = 1;
		memcpy(request.pair, pair, sizeof(request.pair));
	}
	result = tell(pid, &page, request);
	return !result && !strcmp(kind, "late") ? (int)value : result;
}

static int change_files(int pid, int from, int to, const char *kind, long value)
{
	long state = number(of_pid("state", pid), -1);

	if (!strcmp(kind, "state")) {
		write_number(of_pid("state", pid), value);
		if (value == CHECKPOINTED)
			move_descriptors(pid, "fd", "kept");
		else
			move_descriptors(pid, "kept", "fd");
		return SUCCESS;
	}
	if (!strcmp(kind, "stay") || !strcmp(kind, "hang"))
		return SUCCESS;
	if (state != from)
		return ILLEGAL_STATE;
	write_number(of_pid("state", pid), to);
	if (to == CHECKPOINTED)
		move_descriptors(pid, "fd", "kept");
	if (from == CHECKPOINTED)
		move_descriptors(pid, "kept", "fd");
	return !strcmp(kind, "late") ? (int)value : SUCCESS;
}

static int change(const char *call, int op, int pid, int from, int to, const unsigned char *pair)
{
	int fd = lock_all(), in_files = !access(of_pid("state", pid), F_OK), result;
	char kind[16];
	long value;

	note(call, pid, pair);
	plan(call, kind, &value);
	if (!strcmp(kind, "die"))
		_exit(9);
	if (!strcmp(kind, "slow"))
		usleep((useconds_t)value * 1000);
	if (!strcmp(kind, "error"))
		result = (int)value;
	else if (!initialized)
		result = NOT_INITIALIZED;
	else if (in_files)
		result = change_files(pid, from, to, kind, value);
	else {
		/* Takes long; others may call meanwhile. */
		close(fd);
		fd = -1;
		result = change_application(pid, op, to, kind, value, pair);
	}
	if (fd >= 0)
		close(fd);
	if (!strcmp(kind, "hang") || !strcmp(kind, "hung"))
		hang();
	return result;
}

/* --- libcuda ---------------------------------------------------------------------------------------------------- */

struct lock_args {
	unsigned int timeout_ms, reserved0;
	unsigned long long reserved1[7];
};
struct restore_args {
	const unsigned char *pairs;
	unsigned int count, reserved0;
	unsigned long long reserved[6];
};
_Static_assert(sizeof(struct lock_args) == 64 && sizeof(struct restore_args) == 64, "blocks of 64 bytes");

/* A call without a process: only failing, hanging and dying make sense. Applications call some of them, too. */
static int plain(const char *call)
{
	int fd;
	char kind[16];
	long value;

	if (!getenv(DIRECTORY))
		return SUCCESS;
	fd = lock_all();
	plan(call, kind, &value);
	close(fd);
	if (!strcmp(kind, "die"))
		_exit(9);
	if (!strcmp(kind, "hang"))
		hang();
	return !strcmp(kind, "error") ? (int)value : SUCCESS;
}

int cuInit(unsigned int flags)
{
	int result = plain("Init");

	initialized = !result && !flags;
	return result;
}

int cuDriverGetVersion(int *version)
{
	*version = atoi(config("api", "13000"));
	return SUCCESS;
}

int cuGetErrorName(int code, const char **name)
{
	static const struct {
		int code;
		const char *name;
	} names[] = {
		{INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},     {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
		{NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"}, {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
		{INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},   {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
		{INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"}, {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE"},
		{NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},             {NOT_READY, "CUDA_ERROR_NOT_READY"},
	};

	*name = "CUDA_ERROR_UNKNOWN";
	for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
		if (names[i].code == code)
			*name = names[i].name;
	return SUCCESS;
}

int cuCheckpointProcessGetState(int pid, int *state)
{
	int fd = lock_all();
	char kind[16];
	struct page page;
	long value, now = number(of_pid("state", pid), -1);

	plan("GetState", kind, &value);
	close(fd);
	if (!strcmp(kind, "die"))
		_exit(9);
	if (!strcmp(kind, "hang") || !strcmp(kind, "hung"))
		hang();
	if (!strcmp(kind, "slow"))
		usleep((useconds_t)value * 1000);
	if (!strcmp(kind, "error") || !strcmp(kind, "late"))
		return (int)value;
	if (now < 0 && find(pid, &page))
		now = page.state;
	if (!initialized || now < 0)
		return NOT_INITIALIZED;
	*state = !strcmp(kind, "state") ? (int)value : (int)now;
	return SUCCESS;
}

int cuCheckpointProcessLock(int pid, const struct lock_args *args)
{
	if (!args || !args->timeout_ms || args->reserved0 || args->reserved1[6])
		return INVALID_VALUE;
	return change("Lock", LOCK, pid, RUNNING, LOCKED, NULL);
}

int cuCheckpointProcessCheckpoint(int pid, const void *args)
{
	return args ? INVALID_VALUE : change("Checkpoint", CHECKPOINT, pid, LOCKED, CHECKPOINTED, NULL);
}

int cuCheckpointProcessRestore(int pid, const struct restore_args *args)
{
	if (args && (args->count != 1 || args->reserved0 || args->reserved[5]))
		return INVALID_VALUE;
	return change("Restore", RESTORE, pid, CHECKPOINTED, LOCKED, args ? args->pairs : NULL);
}

int cuCheckpointProcessUnlock(int pid, const void *args)
{
	return args ? INVALID_VALUE : change("Unlock", UNLOCK, pid, LOCKED, RUNNING, NULL);
}

/* --- libnvidia-ml; devices differ in index, minor number and UUID only ------------------------------------------------ */

struct memory {
	unsigned long long total, free, used;
};
struct process {
	unsigned int pid;
	unsigned long long used;
	unsigned int gpu, compute;
};
typedef void *device;

/* The minor number of the nth GPU, or -1. Applications see those they have device files of. */
static int minor_of(unsigned int index)
{
	int minors[SLOTS], count = 0;
	char name[32];

	if (!getenv(DIRECTORY))
		return index < (unsigned int)visible(minors) ? minors[index] : -1;
	while (count < SLOTS && (snprintf(name, sizeof(name), "gpu%d", count), !access(path(name), F_OK)))
		count++;
	count = atoi(config("count", count ? "0" : "1")) ?: count;
	return index < (unsigned int)count ? (int)index : -1;
}

/* A process that uses NVML has a descriptor that no checkpoint closes. */
static int control = -1, users;

int nvmlInit_v2(void)
{
	if (!users++)
		control = open(device_file("nvidiactl"), O_RDWR | O_CLOEXEC);
	return plain("nvmlInit");
}

int nvmlShutdown(void)
{
	if (!users)
		return NVML_UNINITIALIZED;
	if (!--users && control >= 0)
		close(control);
	return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *text, unsigned int size)
{
	snprintf(text, size, "%s", config("driver", "580.95.05"));
	return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *count)
{
	for (*count = 0; minor_of(*count) >= 0; ++*count)
		;
	return plain("Facts");
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, device *found)
{
	*found = (device)(unsigned long)(minor_of(index) + 1);
	return *found ? SUCCESS : NVML_INVALID_ARGUMENT;
}

int nvmlDeviceGetName(device d, char *text, unsigned int size)
{
	(void)d;
	snprintf(text, size, "%s", config("name", "Fake H200"));
	return SUCCESS;
}

int nvmlDeviceGetUUID(device d, char *text, unsigned int size)
{
	snprintf(text, size, "GPU-00000000-0000-0000-0000-%012lx", (unsigned long)d - 1);
	return SUCCESS;
}

int nvmlDeviceGetMinorNumber(device d, unsigned int *minor)
{
	*minor = (unsigned int)(unsigned long)d - 1;
	return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(device d, int *major, int *minor)
{
	(void)d;
	*major = 9;
	*minor = 0;
	return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(device d, struct memory *memory)
{
	unsigned int minor = (unsigned int)(unsigned long)d - 1;
	char name[32];
	uint64_t total = 1ULL << 37, used = 0;
	int fd;

	snprintf(name, sizeof(name), getenv(DIRECTORY) ? "gpu%u" : "nvidia%u", minor);
	fd = open(getenv(DIRECTORY) ? path(name) : device_file(name), O_RDWR | O_CLOEXEC);
	if (fd >= 0) {
		gpu_memory(fd, &total, &used);
		close(fd);
	}
	memory->total = total;
	memory->free = strtoull(config("free", "-1"), NULL, 10);
	if (memory->free > total - used)
		memory->free = total - used;
	memory->used = memory->total - memory->free;
	return SUCCESS;
}

int nvmlDeviceGetMigMode(device d, unsigned int *current, unsigned int *pending)
{
	(void)d;
	*current = *pending = (unsigned int)atoi(config("mig", "0"));
	return atoi(config("mig", "-1")) < 0 ? NVML_NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetVirtualizationMode(device d, int *mode)
{
	(void)d;
	*mode = atoi(config("virtual", "0"));
	return SUCCESS;
}

int nvmlDeviceGetComputeMode(device d, unsigned int *mode)
{
	(void)d;
	*mode = (unsigned int)atoi(config("compute", "0"));
	return SUCCESS;
}

static void add(struct process *list, unsigned int *count, unsigned int room, int pid, uint64_t used)
{
	if (*count < room)
		list[(*count)++] = (struct process){.pid = (unsigned int)pid, .used = used, .gpu = -1U, .compute = -1U};
}

int nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned int *count, struct process *list)
{
	int minor = (int)(unsigned long)d - 1;
	DIR *dir = minor ? NULL : opendir(path("used"));
	struct dirent *entry;
	struct page page;
	unsigned int room = *count;
	char name[32];

	*count = 0;
	while (dir && (entry = readdir(dir)))
		if (atoi(entry->d_name))
			add(list, count, room, atoi(entry->d_name), (uint64_t)number(of_pid("used", atoi(entry->d_name)), 0));
	if (dir)
		closedir(dir);
	/* Without a GPU in a file there are no applications of it: those of another test that runs now are not ours. */
	snprintf(name, sizeof(name), "gpu%d", minor);
	dir = access(path(name), F_OK) ? NULL : opendir("/proc");
	while (dir && (entry = readdir(dir)))
		if (atoi(entry->d_name) && find(atoi(entry->d_name), &page) && page.minor == minor && page.bytes)
			add(list, count, room, atoi(entry->d_name), page.bytes);
	if (dir)
		closedir(dir);
	return SUCCESS;
}
