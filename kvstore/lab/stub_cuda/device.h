/* One imagined device, whose memory is this process's: for stub.c compiled with -DWITH_DEVICE.
 *
 * It knows what it has given out, so that kvikio takes those pointers for device memory; copies are done before a call returns.
 * There is no cuFile behind it: kvikio works in its compatibility mode, as on a host with a GPU and without GPUDirect Storage.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST 4096
#define INVALID 1
#define OUT_OF_MEMORY 2

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    uintptr_t base;
    size_t size;
} given[MOST];
static int context; /* its address is the handle of everything */

static int find(uintptr_t pointer) {
    for (int at = 0; at < MOST; at++)
        if (given[at].base && pointer >= given[at].base && pointer < given[at].base + given[at].size) return at;
    return -1;
}

int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return ordinal ? 101 : 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "imagined device", size); return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = (size_t)1 << 30; return 0; }
int cuDevicePrimaryCtxRetain(void **out, int device) { *out = &context; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxGetCurrent(void **out) { *out = &context; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxSetCurrent(void *in) { return 0; }
int cuCtxPushCurrent_v2(void *in) { return 0; }
int cuCtxPopCurrent_v2(void **out) { *out = &context; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuStreamCreate(void **out, unsigned flags) { *out = &context; return 0; }
int cuStreamDestroy_v2(void *stream) { return 0; }
int cuStreamSynchronize(void *stream) { return 0; }
int cuStreamQuery(void *stream) { return 0; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return 0; }
int cuEventCreate(void **out, unsigned flags) { *out = &context; return 0; }
int cuEventDestroy_v2(void *event) { return 0; }
int cuEventRecord(void *event, void *stream) { return 0; }
int cuEventSynchronize(void *event) { return 0; }
int cuEventQuery(void *event) { return 0; }
int cuLaunchHostFunc(void *stream, void (*call)(void *), void *data) { call(data); return 0; }
int cuMemHostAlloc(void **out, size_t size, unsigned flags) { return posix_memalign(out, 4096, size) ? OUT_OF_MEMORY : 0; }
int cuMemFreeHost(void *memory) { free(memory); return 0; }
int cuMemcpyHtoD_v2(uintptr_t to, const void *from, size_t size) { memcpy((void *)to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, uintptr_t from, size_t size) { memcpy(to, (void *)from, size); return 0; }
int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t size, void *stream) { return cuMemcpyHtoD_v2(to, from, size); }
int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t size, void *stream) { return cuMemcpyDtoH_v2(to, from, size); }

int cuMemAlloc_v2(uintptr_t *out, size_t size) {
    void *memory;
    if (posix_memalign(&memory, 4096, size)) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < MOST && given[at].base) at++;
    if (at < MOST) {
        given[at].base = (uintptr_t)memory;
        given[at].size = size;
    }
    pthread_mutex_unlock(&lock);
    if (at == MOST) {
        free(memory);
        return OUT_OF_MEMORY;
    }
    *out = (uintptr_t)memory;
    return 0;
}

int cuMemFree_v2(uintptr_t memory) {
    pthread_mutex_lock(&lock);
    int at = find(memory);
    if (at >= 0) given[at].base = 0;
    pthread_mutex_unlock(&lock);
    if (at < 0) return INVALID;
    free((void *)memory);
    return 0;
}

int cuMemGetAddressRange_v2(uintptr_t *base, size_t *size, uintptr_t pointer) {
    pthread_mutex_lock(&lock);
    int at = find(pointer);
    if (at >= 0 && base) *base = given[at].base;
    if (at >= 0 && size) *size = given[at].size;
    pthread_mutex_unlock(&lock);
    return at < 0 ? INVALID : 0;
}

int cuPointerGetAttribute(void *out, int attribute, uintptr_t pointer) {
    pthread_mutex_lock(&lock);
    int at = find(pointer);
    pthread_mutex_unlock(&lock);
    if (at < 0) return INVALID;
    switch (attribute) {
        case 1: *(void **)out = &context; return 0;             /* context */
        case 2: *(unsigned *)out = 2; return 0;                 /* memory type: device */
        case 3: *(uintptr_t *)out = pointer; return 0;          /* device pointer */
        case 9: *(int *)out = 0; return 0;                      /* ordinal of the device */
        case 11: *(uintptr_t *)out = given[at].base; return 0;  /* start of the allocation */
        case 12: *(size_t *)out = given[at].size; return 0;     /* its size */
        default: return INVALID;
    }
}
