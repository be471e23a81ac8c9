/* A small libcuda.so.1 without a GPU: device memory is POSIX shared memory, so that a handle made by one process can be
 * opened by another, as with the true driver's IPC. What it tells comes from the environment at each call:
 *
 *     FAKE_CUDA_COUNT (1), FAKE_CUDA_INTEGRATED (0), FAKE_CUDA_INIT (0: a CUresult)
 *     FAKE_CUDA_STATE: a file; its lines "used=BYTES", "total=BYTES" and "fail=CUresult" are read at each call
 *
 * Names and numbers are cuda.h's. A handle is 64 bytes: the segment's name and its size. Calls need a current context.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };
enum { MOST = 64 };

typedef struct { char name[48]; uint64_t size; uint64_t magic; } handle;
typedef struct { unsigned char reserved[64]; } ipc_handle;
static const uint64_t MAGIC = 0x41444355454b4146ull;

static struct { char *start; size_t size; } maps[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int is_initialised, retained;
static __thread int depth;

static long number(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static long state(const char *key, long otherwise)
{
    const char *path = getenv("FAKE_CUDA_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[128];
    size_t length = strlen(key);
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, key, length) && line[length] == '=')
            otherwise = atol(line + length + 1);
    if (file)
        fclose(file);
    return otherwise;
}

static int ready(void)
{
    if (!is_initialised)
        return NOT_INITIALIZED;
    return state("fail", 0) ? (int)state("fail", 0) : depth > 0 ? 0 : INVALID_CONTEXT;
}

static int find(uint64_t address, size_t size)
{
    for (int i = 0; i < MOST; i++)
        if (maps[i].start && address >= (uint64_t)maps[i].start &&
            address + size <= (uint64_t)maps[i].start + maps[i].size)
            return i;
    return -1;
}

int cuInit(unsigned flags)
{
    (void)flags;
    int code = (int)number("FAKE_CUDA_INIT", 0);
    is_initialised = !code;
    return code;
}

int cuGetErrorName(int code, const char **text)
{
    *text = code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : code == INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE"
        : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : NULL;
    return *text ? 0 : INVALID_VALUE;
}

int cuDeviceGetCount(int *count) { *count = (int)number("FAKE_CUDA_COUNT", 1); return 0; }

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal >= 0 && ordinal < number("FAKE_CUDA_COUNT", 1) ? 0 : INVALID_DEVICE;
}

int cuDeviceGetName(char *name, int length, int device) { snprintf(name, (size_t)length, "Fake %d", device); return 0; }

int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    (void)device;
    *bytes = (size_t)state("total", 1L << 33);
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == 75 ? 8 : attribute == 76 ? 6 : attribute == 18 ? (int)number("FAKE_CUDA_INTEGRATED", 0) : 0;
    return 0;
}

int cuDeviceGetUuid(unsigned char *uuid, int device) { memset(uuid, 0x10 + device, 16); return 0; }

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = (void *)(uintptr_t)(device + 1);
    pthread_mutex_lock(&lock);
    retained++;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    (void)device;
    pthread_mutex_lock(&lock);
    retained--;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuCtxPushCurrent_v2(void *context) { (void)context; depth++; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = NULL; depth--; return 0; }

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    *total = (size_t)state("total", 1L << 33);
    *free_bytes = *total - (size_t)state("used", 0);
    return ready();
}

int cuIpcOpenMemHandle_v2(uint64_t *address, ipc_handle raw, unsigned flags)
{
    handle given;
    memcpy(&given, &raw, sizeof given);
    if (ready())
        return ready();
    if (given.magic != MAGIC || flags != 1 || given.name[47])
        return INVALID_HANDLE;
    int descriptor = shm_open(given.name, O_RDWR, 0);
    if (descriptor < 0)
        return INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    char *start = mmap(NULL, given.size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    int slot = 0;
    while (slot < MOST - 1 && maps[slot].start)
        slot++;
    maps[slot].start = start;
    maps[slot].size = given.size;
    pthread_mutex_unlock(&lock);
    *address = (uint64_t)start;
    return 0;
}

int cuIpcCloseMemHandle(uint64_t address)
{
    if (ready())
        return ready();
    pthread_mutex_lock(&lock);
    int slot = find(address, 1);
    if (slot >= 0) {
        /* Both under the lock: the address may be another thread's the moment it is free. */
        munmap(maps[slot].start, maps[slot].size);
        maps[slot].start = NULL;
    }
    pthread_mutex_unlock(&lock);
    return slot < 0 ? INVALID_VALUE : 0;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address)
{
    int slot = find(address, 1);
    if (ready())
        return ready();
    if (slot < 0)
        return INVALID_VALUE;
    *base = (uint64_t)maps[slot].start;
    *size = maps[slot].size;
    return 0;
}

int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t size)
{
    if (ready())
        return ready();
    if (find(source, size) < 0)
        return INVALID_VALUE;
    memcpy(target, (void *)source, size);
    return 0;
}

int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t size)
{
    if (ready())
        return ready();
    if (find(target, size) < 0)
        return INVALID_VALUE;
    memcpy((void *)target, source, size);
    return 0;
}

/* How many allocations are mapped in this process, for tests that look for leaks. */
int fake_cuda_open_count(void)
{
    int count = 0;
    for (int i = 0; i < MOST; i++)
        count += maps[i].start != NULL;
    return count;
}

int fake_cuda_retained(void) { return retained; }
