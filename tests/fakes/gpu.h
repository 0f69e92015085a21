/*
 * What the two sides of the fake driver share: the GPU in a file, the page that tells of an application, and their messages.
 */
#ifndef GPU_H
#define GPU_H

#include <stdint.h>
#include <sys/types.h>

enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };
enum {
	SUCCESS = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	INVALID_IMAGE = 200,
	INVALID_CONTEXT = 201,
	ILLEGAL_STATE = 401,
	NOT_FOUND = 500,
	NOT_READY = 600,
	UNKNOWN = 999,
};

/* --- the GPU: a file. First its table, then its memory. Opened by applications as /dev/nvidiaN. */

#define TABLE 65536
#define SPANS 1024
#define SLOTS 256

struct span {
	uint32_t slot, used;
	uint64_t offset, size;
};

/* All zero at first. Changed under a lock (OFD) of byte 0; a process that has the GPU open locks the byte of its slot, 1 and up:
 * the kernel drops that lock when the process dies, and its memory is free then. */
struct table {
	struct span spans[SPANS];
};
_Static_assert(sizeof(struct table) <= TABLE, "fits");

/* Bytes in all and in use by living processes of the GPU that is open as `fd`. 0, or -1 if it cannot be read. */
int gpu_memory(int fd, uint64_t *total, uint64_t *used);

/* Minor numbers of the GPUs that an application sees, ascending; returns how many. */
int visible(int minors[SLOTS]);
const char *device_file(const char *name);

/* --- an application: tells of itself in a page at a fixed address, which the driver's side reads through /proc/PID/mem. The page
 * and the socket travel with the process through a dump, so that nothing outside has to remember it. */

#define PAGE_AT 0x6e7600000000UL
#define MAGIC 0x7570676b61663031UL

struct page {
	uint64_t magic;
	int pid;      /* in its own PID namespace; a forked child has a copy of the page */
	int socket;   /* its descriptor of the driver's end of the socket pair */
	int state;
	int minor;    /* of the GPU it uses or used */
	uint64_t bytes; /* of the GPU's memory that it has */
};

enum { LOCK, CHECKPOINT, RESTORE, UNLOCK, BREAK };

struct request {
	uint64_t number;
	int op;
	int lose;                /* one byte of the GPU's memory shall be wrong afterwards */
	int paired;
	unsigned char pair[32];  /* UUIDs, old and new */
};

struct answer {
	uint64_t number;
	int result;
};

#endif
