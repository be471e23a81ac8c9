/* NVIDIA's driver without a GPU: device memory is the host's, copies happen at once, a graph is a list of callbacks.

It is strict where the true one is: no call without a current context, no copy past the end of a buffer, no waiting
while a stream is captured. What a process would tell of its GPU comes from the environment:
FAKE_CUDA_INIT (a CUresult), FAKE_CUDA_VERSION (13000), FAKE_CUDA_COUNT, FAKE_CUDA_NAME, FAKE_CUDA_CAPABILITY (86), FAKE_CUDA_INTEGRATED,
FAKE_CUDA_BYTES (allocations beyond it fail), FAKE_CUDA_TALLY: a file of four 64-bit numbers, which are counted up: copies
between host and device, copies on the device, the bytes of each.

Memory of clients, by handle, is POSIX shared memory: 48 bytes of its name, its size, and FAKEUCDA. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define OUT_OF_MEMORY 2
#define INVALID_VALUE 1
#define NO_DEVICE 100
#define INVALID_CONTEXT 201
#define INVALID_HANDLE 400
#define NOT_FOUND 500
#define ILLEGAL_ADDRESS 700
#define CAPTURE_UNSUPPORTED 900
#define CAPTURE_INVALIDATED 901

typedef void (*work)(int);
typedef struct block { char *start; size_t size; int is_host, is_foreign; struct block *next; } block;
typedef struct { int is_live, is_capturing, is_broken, count; work call[16]; int id[16]; } stream;
typedef struct { int count; work call[16]; int id[16]; } graph;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block *blocks;
static size_t used_bytes;
static int live_streams, live_graphs, retained, launches, poison;
static __thread int depth;

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static int ready(void) { return poison ? poison : depth > 0 ? 0 : INVALID_CONTEXT; }

static block *find(const char *address, size_t size) {
    for (block *item = blocks; item; item = item->next)
        if (address >= item->start && address + size <= item->start + item->size) return item;
    return NULL;
}

static int make(void **address, size_t size, int is_host) {
    if (ready()) return ready();
    pthread_mutex_lock(&lock);
    int code = 0;
    if (size == 0) code = INVALID_VALUE;
    else if (!is_host && used_bytes + size > (size_t)number("FAKE_CUDA_BYTES", 1L << 33)) code = OUT_OF_MEMORY;
    else {
        block *item = malloc(sizeof *item);
        *item = (block){aligned_alloc(256, (size + 255) / 256 * 256), size, is_host, 0, blocks};
        memset(item->start, 0xA5, size);
        blocks = item;
        if (!is_host) used_bytes += size;
        *address = item->start;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int drop(void *address, int is_host) {
    if (ready() == INVALID_CONTEXT) return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    int code = INVALID_VALUE;
    for (block **at = &blocks; *at; at = &(*at)->next)
        if ((*at)->start == address && (*at)->is_host == is_host && !(*at)->is_foreign) {
            block *item = *at;
            *at = item->next;
            if (!is_host) used_bytes -= item->size;
            free(item->start);
            free(item);
            code = 0;
            break;
        }
    pthread_mutex_unlock(&lock);
    return code;
}

/* -- what tests ask ------------------------------------------------------------------------------------------------ */

EXPORT int fake_cuda_live(void) {
    int count = live_streams + live_graphs + retained;
    for (block *item = blocks; item; item = item->next) count++;
    return count;
}
EXPORT int fake_cuda_launches(void) { return launches; }
EXPORT int fake_cuda_is_capturing(stream *s) { return s->is_capturing; }
EXPORT void fake_cuda_break_capture(stream *s) { s->is_broken = 1; }
EXPORT void fake_cuda_break(int code) { poison = code; }
EXPORT int fake_cuda_is_device(void *address, size_t size) {
    block *item = find(address, size);
    return item != NULL && !item->is_host;
}
EXPORT int fake_cuda_open_count(void) {
    int count = 0;
    for (block *item = blocks; item; item = item->next) count += item->is_foreign;
    return count;
}
EXPORT int fake_cuda_is_known(void *address, size_t size) { return find(address, size) != NULL; }
EXPORT int fake_cuda_record(stream *s, work call, int id) {
    if (!s->is_capturing || s->count == 16) return INVALID_VALUE;
    s->call[s->count] = call;
    s->id[s->count++] = id;
    return 0;
}

/* -- cuda.h -------------------------------------------------------------------------------------------------------- */

EXPORT int cuInit(unsigned flags) { (void)flags; return (int)number("FAKE_CUDA_INIT", 0); }
EXPORT int cuDriverGetVersion(int *version) { *version = (int)number("FAKE_CUDA_VERSION", 13000); return 0; }
EXPORT int cuDeviceGetCount(int *count) { *count = (int)number("FAKE_CUDA_COUNT", 1); return 0; }
EXPORT int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= number("FAKE_CUDA_COUNT", 1)) return 101;
    *device = ordinal;
    return 0;
}
EXPORT int cuDeviceGetName(char *name, int size, int device) {
    (void)device;
    const char *text = getenv("FAKE_CUDA_NAME");
    snprintf(name, (size_t)size, "%s", text ? text : "Fake GPU");
    return 0;
}
EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    (void)device;
    *bytes = (size_t)number("FAKE_CUDA_BYTES", 1L << 33);
    return 0;
}
EXPORT int cuDeviceGetAttribute(int *value, int kind, int device) {
    (void)device;
    long capability = number("FAKE_CUDA_CAPABILITY", 86);
    *value = kind == 75 ? (int)(capability / 10) : kind == 76 ? (int)(capability % 10)
           : kind == 18 ? (int)number("FAKE_CUDA_INTEGRATED", 0) : 0;
    return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(uintptr_t)(0x1000 + device);
    __sync_add_and_fetch(&retained, 1);
    return 0;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    __sync_sub_and_fetch(&retained, 1);
    return 0;
}
EXPORT int cuCtxPushCurrent_v2(void *context) { if (!context) return INVALID_CONTEXT; depth++; return 0; }
EXPORT int cuCtxPopCurrent_v2(void **context) {
    if (depth == 0) return INVALID_CONTEXT;
    depth--;
    if (context) *context = NULL;
    return 0;
}
EXPORT int cuMemGetInfo_v2(size_t *available, size_t *total) {
    if (ready()) return ready();
    *total = (size_t)number("FAKE_CUDA_BYTES", 1L << 33);
    *available = *total - used_bytes;
    return 0;
}
EXPORT int cuMemAlloc_v2(uint64_t *address, size_t size) {
    void *made = NULL;
    int code = make(&made, size, 0);
    *address = (uint64_t)(uintptr_t)made;
    return code;
}
EXPORT int cuMemFree_v2(uint64_t address) { return drop((void *)(uintptr_t)address, 0); }
EXPORT int cuMemHostAlloc(void **address, size_t size, unsigned flags) { (void)flags; return make(address, size, 1); }
EXPORT int cuMemFreeHost(void *address) { return drop(address, 1); }
EXPORT int cuMemHostGetDevicePointer_v2(uint64_t *address, void *host, unsigned flags) {
    (void)flags;
    *address = (uint64_t)(uintptr_t)host;
    return find(host, 1) ? 0 : INVALID_VALUE;
}
/* Counts where the environment says, for whoever started the process. */
static void tally(int is_on_device, size_t size) {
    static uint64_t *counts;
    pthread_mutex_lock(&lock);
    const char *path = getenv("FAKE_CUDA_TALLY");
    if (path && !counts) {
        int file = open(path, O_RDWR);
        void *there = file < 0 ? MAP_FAILED : mmap(NULL, 32, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        if (there != MAP_FAILED) counts = there;
    }
    if (counts) {
        counts[is_on_device]++;
        counts[2 + is_on_device] += size;
    }
    pthread_mutex_unlock(&lock);
}

static int is_on_device(void *address, size_t size) {
    pthread_mutex_lock(&lock);
    block *item = find(address, size);
    int found = item && !item->is_host;
    pthread_mutex_unlock(&lock);
    return found;
}

static int is_locked(void *address, size_t size) {
    pthread_mutex_lock(&lock);
    block *item = find(address, size);
    int found = item && item->is_host;
    pthread_mutex_unlock(&lock);
    return found;
}

static int copy(void *target, void *source, size_t size, stream *s, int is_in) {
    if (ready()) return ready();
    if (!s || !s->is_live) return INVALID_HANDLE;
    void *device = is_in ? target : source, *host = is_in ? source : target;
    if (!is_on_device(device, size) || !is_locked(host, size)) return ILLEGAL_ADDRESS;
    tally(0, size);
    memcpy(target, source, size);
    return 0;
}
static int copy_within(uint64_t target, uint64_t source, size_t size) {
    if (ready()) return ready();
    void *to = (void *)(uintptr_t)target, *from = (void *)(uintptr_t)source;
    if (!is_on_device(to, size) || !is_on_device(from, size)) return ILLEGAL_ADDRESS;
    tally(1, size);
    memmove(to, from, size);
    return 0;
}
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size, stream *s) {
    if (!s || !s->is_live) return INVALID_HANDLE;
    return copy_within(target, source, size);
}
EXPORT int cuMemcpyDtoD_v2(uint64_t target, uint64_t source, size_t size) { return copy_within(target, source, size); }
EXPORT int cuMemsetD8Async(uint64_t target, unsigned char value, size_t size, stream *s) {
    if (ready()) return ready();
    if (!s || !s->is_live) return INVALID_HANDLE;
    if (!is_on_device((void *)(uintptr_t)target, size)) return ILLEGAL_ADDRESS;
    memset((void *)(uintptr_t)target, value, size);
    return 0;
}
EXPORT int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t size) {
    if (ready()) return ready();
    if (!is_on_device((void *)(uintptr_t)source, size)) return ILLEGAL_ADDRESS;
    tally(0, size);
    memcpy(target, (void *)(uintptr_t)source, size);
    return 0;
}
EXPORT int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t size) {
    if (ready()) return ready();
    if (!is_on_device((void *)(uintptr_t)target, size)) return ILLEGAL_ADDRESS;
    tally(0, size);
    memcpy((void *)(uintptr_t)target, source, size);
    return 0;
}
typedef struct { char name[48]; uint64_t size; char magic[8]; } ipc_handle;
EXPORT int cuIpcOpenMemHandle_v2(uint64_t *address, ipc_handle given, unsigned flags) {
    if (ready()) return ready();
    if (memcmp(given.magic, "FAKEUCDA", 8) || flags != 1 || given.name[47]) return INVALID_HANDLE;
    int file = shm_open(given.name, O_RDWR, 0);
    if (file < 0) return INVALID_HANDLE;
    char *start = mmap(NULL, given.size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    pthread_mutex_lock(&lock);
    block *item = malloc(sizeof *item);
    *item = (block){start, given.size, 0, 1, blocks};
    blocks = item;
    pthread_mutex_unlock(&lock);
    *address = (uint64_t)(uintptr_t)start;
    return 0;
}
EXPORT int cuIpcCloseMemHandle(uint64_t address) {
    if (ready()) return ready();
    pthread_mutex_lock(&lock);
    int code = INVALID_VALUE;
    for (block **at = &blocks; *at; at = &(*at)->next)
        if ((uint64_t)(uintptr_t)(*at)->start == address && (*at)->is_foreign) {
            block *item = *at;
            *at = item->next;
            munmap(item->start, item->size);
            free(item);
            code = 0;
            break;
        }
    pthread_mutex_unlock(&lock);
    return code;
}
EXPORT int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
    if (ready()) return ready();
    pthread_mutex_lock(&lock);
    block *item = find((void *)(uintptr_t)address, 1);
    if (item) *base = (uint64_t)(uintptr_t)item->start, *size = item->size;
    pthread_mutex_unlock(&lock);
    return item ? 0 : INVALID_VALUE;
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t target, void *source, size_t size, void *s) {
    return copy((void *)(uintptr_t)target, source, size, s, 1);
}
EXPORT int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t size, void *s) {
    return copy(target, (void *)(uintptr_t)source, size, s, 0);
}
EXPORT int cuStreamCreate(void **made, unsigned flags) {
    (void)flags;
    if (ready()) return ready();
    stream *s = calloc(1, sizeof *s);
    s->is_live = 1;
    *made = s;
    __sync_add_and_fetch(&live_streams, 1);
    return 0;
}
EXPORT int cuStreamDestroy_v2(stream *s) {
    free(s);
    __sync_sub_and_fetch(&live_streams, 1);
    return 0;
}
EXPORT int cuStreamSynchronize(stream *s) {
    if (ready()) return ready();
    if (!s || !s->is_capturing) return 0;
    s->is_broken = 1;
    return CAPTURE_UNSUPPORTED;
}
EXPORT int cuStreamBeginCapture_v2(stream *s, int mode) {
    (void)mode;
    if (ready()) return ready();
    s->is_capturing = 1;
    s->is_broken = s->count = 0;
    return 0;
}
EXPORT int cuStreamEndCapture(stream *s, void **made) {
    *made = NULL;
    if (!s->is_capturing) return 401;
    s->is_capturing = 0;
    if (s->is_broken) return CAPTURE_INVALIDATED;
    if (s->count == 0) return 0;
    graph *g = calloc(1, sizeof *g);
    g->count = s->count;
    memcpy(g->call, s->call, sizeof g->call);
    memcpy(g->id, s->id, sizeof g->id);
    *made = g;
    __sync_add_and_fetch(&live_graphs, 1);
    return 0;
}
EXPORT int cuGraphInstantiateWithFlags(void **made, graph *g, unsigned long long flags) {
    (void)flags;
    graph *copy_of = calloc(1, sizeof *copy_of);
    *copy_of = *g;
    *made = copy_of;
    __sync_add_and_fetch(&live_graphs, 1);
    return 0;
}
EXPORT int cuGraphDestroy(void *g) { free(g); __sync_sub_and_fetch(&live_graphs, 1); return 0; }
EXPORT int cuGraphExecDestroy(void *g) { return cuGraphDestroy(g); }
EXPORT int cuGraphLaunch(graph *g, stream *s) {
    if (ready()) return ready();
    if (!s->is_live) return INVALID_HANDLE;
    __sync_add_and_fetch(&launches, 1);
    for (int i = 0; i < g->count; i++) g->call[i](g->id[i]);
    return 0;
}
EXPORT int cuGetErrorName(int code, const char **name) {
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : code == CAPTURE_INVALIDATED ? "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
          : code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : code == INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE" : "CUDA_ERROR_FAKE";
    return 0;
}
EXPORT int cuGetErrorString(int code, const char **name) { return cuGetErrorName(code, name); }
EXPORT int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, void *status) {
    (void)version; (void)flags; (void)status;
    char longer[128];
    snprintf(longer, sizeof longer, "%s_v2", name);
    void *self = dlopen(NULL, RTLD_LAZY);
    (void)self;
    Dl_info here;
    dladdr((void *)cuInit, &here);
    void *library = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (strcmp(name, "cuGraphInstantiate") == 0) snprintf(longer, sizeof longer, "cuGraphInstantiateWithFlags");
    *found = dlsym(library, longer);
    if (!*found) *found = dlsym(library, name);
    return *found ? 0 : NOT_FOUND;
}
EXPORT int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}
