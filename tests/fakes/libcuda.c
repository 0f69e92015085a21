/*
 * The NVIDIA driver as the agent sees it: the symbols of libcuda and libnvidia-ml that agent/cuda.py calls, and no other.
 * No GPU, no memory: a state per PID, kept in files below $VLLMSNAPSHOT_FAKE_GPU, so that several processes see one driver.
 *
 *   state/PID    CUprocessState; a PID without a file does not use CUDA
 *   used/PID     bytes on device 0 (optional)
 *   proc/PID/fd  nvidia* links there go away with a checkpoint and come back with a restore; not 77, which is NVML's
 *   config       NAME=VALUE lines: driver, api, count, name, mig, virtual, free; see `config`
 *   control      lines "CALL NTH KIND [NUMBER]": what happens at the nth call of that name (0: at every one). KIND is
 *                  error N    fail with N, nothing changes          late N    fail with N, though it has been done
 *                  stay       succeed, nothing changes              state N   succeed, the state is N afterwards
 *                  hang       never return, nothing changes         hung      never return, though it has been done
 *                  die        the caller ends
 *   hangs        a FIFO that gets a byte from every call that never returns
 *   calls        a line for every call of cuCheckpointProcess*: NAME PID [OLD NEW]
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };
enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, ILLEGAL_STATE = 401 };
enum { NVML_NOT_SUPPORTED = 3 };

static int initialized;

static const char *path(const char *name)
{
	static char text[4][4096];
	static int next;
	char *to = text[next++ & 3];
	const char *base = getenv("VLLMSNAPSHOT_FAKE_GPU");

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

static int change(const char *call, int pid, int from, int to, const unsigned char *pair)
{
	int fd = lock_all(), result = SUCCESS;
	char kind[16];
	long value, state = number(of_pid("state", pid), -1);

	note(call, pid, pair);
	plan(call, kind, &value);
	if (!strcmp(kind, "die"))
		_exit(9);
	if (!strcmp(kind, "error")) {
		result = (int)value;
	} else if (!initialized || state < 0) {
		result = NOT_INITIALIZED;
	} else if (!strcmp(kind, "state")) {
		write_number(of_pid("state", pid), value);
		if (value == CHECKPOINTED)
			move_descriptors(pid, "fd", "kept");
		else
			move_descriptors(pid, "kept", "fd");
	} else if (!strcmp(kind, "stay") || !strcmp(kind, "hang")) {
		;
	} else if (state != from) {
		result = ILLEGAL_STATE;
	} else {
		write_number(of_pid("state", pid), to);
		if (to == CHECKPOINTED)
			move_descriptors(pid, "fd", "kept");
		if (from == CHECKPOINTED)
			move_descriptors(pid, "kept", "fd");
		if (!strcmp(kind, "late"))
			result = (int)value;
	}
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

/* A call without a process: only failing, hanging and dying make sense. */
static int plain(const char *call)
{
	int fd = lock_all();
	char kind[16];
	long value;

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
	*name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 3 ? "CUDA_ERROR_NOT_INITIALIZED" : code == 600 ? "CUDA_ERROR_NOT_READY" :
		code == ILLEGAL_STATE ? "CUDA_ERROR_ILLEGAL_STATE" : "CUDA_ERROR_UNKNOWN";
	return SUCCESS;
}

int cuCheckpointProcessGetState(int pid, int *state)
{
	int fd = lock_all(), result = SUCCESS;
	char kind[16];
	long value, now = number(of_pid("state", pid), -1);

	plan("GetState", kind, &value);
	close(fd);
	if (!strcmp(kind, "die"))
		_exit(9);
	if (!strcmp(kind, "hang") || !strcmp(kind, "hung"))
		hang();
	if (!strcmp(kind, "error") || !strcmp(kind, "late"))
		return (int)value;
	if (!initialized || now < 0)
		return NOT_INITIALIZED;
	*state = !strcmp(kind, "state") ? (int)value : (int)now;
	return result;
}

int cuCheckpointProcessLock(int pid, const struct lock_args *args)
{
	if (!args || !args->timeout_ms || args->reserved0 || args->reserved1[6])
		return INVALID_VALUE;
	return change("Lock", pid, RUNNING, LOCKED, NULL);
}

int cuCheckpointProcessCheckpoint(int pid, const void *args)
{
	return args ? INVALID_VALUE : change("Checkpoint", pid, LOCKED, CHECKPOINTED, NULL);
}

int cuCheckpointProcessRestore(int pid, const struct restore_args *args)
{
	if (args && (args->count != 1 || args->reserved0 || args->reserved[5]))
		return INVALID_VALUE;
	return change("Restore", pid, CHECKPOINTED, LOCKED, args ? args->pairs : NULL);
}

int cuCheckpointProcessUnlock(int pid, const void *args)
{
	return args ? INVALID_VALUE : change("Unlock", pid, LOCKED, RUNNING, NULL);
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

int nvmlInit_v2(void)
{
	return plain("nvmlInit");
}

int nvmlSystemGetDriverVersion(char *text, unsigned int size)
{
	snprintf(text, size, "%s", config("driver", "580.95.05"));
	return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *count)
{
	*count = (unsigned int)atoi(config("count", "1"));
	return plain("Facts");
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, device *found)
{
	*found = (device)(unsigned long)(index + 1);
	return SUCCESS;
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
	(void)d;
	memory->total = 1ULL << 37;
	memory->free = strtoull(config("free", "137438953472"), NULL, 10);
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

int nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned int *count, struct process *list)
{
	DIR *dir = (unsigned long)d == 1 ? opendir(path("used")) : NULL;
	struct dirent *entry;
	unsigned int room = *count;

	*count = 0;
	while (dir && (entry = readdir(dir)))
		if (atoi(entry->d_name) && *count < room) {
			list[*count].pid = (unsigned int)atoi(entry->d_name);
			list[*count].used = (unsigned long long)number(of_pid("used", atoi(entry->d_name)), 0);
			list[*count].gpu = list[*count].compute = 0xffffffff;
			++*count;
		}
	if (dir)
		closedir(dir);
	return SUCCESS;
}
