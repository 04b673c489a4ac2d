/* Devices, and their memory and the pinned memory of the host. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sim.h"

#define MAX_BLOCKS 65536
#define ALIGNMENT 512
#define POISONED_BYTES (64u << 20)

/* One piece of memory; `pointer` is NULL in a free entry. */
struct block {
    char *pointer;
    size_t size;
    int32_t device; /* -1: pinned memory of the host */
};

/* What a caller of the virtual memory interface holds: bytes without an address. */
struct physical {
    size_t size;
    int32_t device;
};

static struct block blocks[MAX_BLOCKS];
static size_t num_blocks;
static size_t used_bytes[SIM_MAX_DEVICES];
static __thread int32_t current_device;

uint32_t sim_num_devices(void)
{
    const char *wanted = getenv("NPU_SIM_DEVICES");
    long count = wanted != NULL ? strtol(wanted, NULL, 10) : 2;

    return count < 0 || count > SIM_MAX_DEVICES ? SIM_MAX_DEVICES : (uint32_t)count;
}

int32_t sim_current_device(void)
{
    return current_device;
}

static struct block *find_block(const void *pointer)
{
    const char *wanted = pointer;

    for (size_t i = 0; i < num_blocks; i++) {
        if (wanted >= blocks[i].pointer && wanted < blocks[i].pointer + blocks[i].size) {
            return &blocks[i];
        }
    }
    return NULL;
}

bool sim_is_pinned(const void *pointer)
{
    struct block *block = find_block(pointer);

    return block != NULL && block->device < 0;
}

static void add_block(void *pointer, size_t size, int32_t device)
{
    size_t place = 0;

    while (place < num_blocks && blocks[place].pointer != NULL) {
        place++;
    }
    if (place == MAX_BLOCKS) {
        abort();
    }
    blocks[place] = (struct block){.pointer = pointer, .size = size, .device = device};
    if (place == num_blocks) {
        num_blocks++;
    }
}

static bool take_bytes(int32_t device, size_t size)
{
    if (used_bytes[device] + size > sim_controls()->memory_bytes) {
        return false;
    }
    used_bytes[device] += size;
    return true;
}

static aclError allocate(void **pointer, size_t size, int32_t device)
{
    aclError status = ACL_ERROR_RT_MEMORY_ALLOCATION;

    pthread_mutex_lock(&sim_lock);
    if (device < 0 || take_bytes(device, size)) {
        if (posix_memalign(pointer, ALIGNMENT, size != 0 ? size : ALIGNMENT) == 0) {
            /* Nothing may rely on what fresh memory holds. */
            memset(*pointer, 0xA5, size < POISONED_BYTES ? size : POISONED_BYTES);
            add_block(*pointer, size, device);
            status = ACL_SUCCESS;
        } else if (device >= 0) {
            used_bytes[device] -= size;
        }
    }
    pthread_mutex_unlock(&sim_lock);
    return status;
}

static aclError release(void *pointer)
{
    aclError status = ACL_ERROR_RT_MEMORY_FREE;

    pthread_mutex_lock(&sim_lock);
    struct block *block = find_block(pointer);
    if (block != NULL && block->pointer == pointer) {
        if (block->device >= 0) {
            used_bytes[block->device] -= block->size;
        } else {
            sim_forget_host(pointer, block->size);
        }
        memset(block, 0, sizeof(*block));
        free(pointer);
        status = ACL_SUCCESS;
    }
    pthread_mutex_unlock(&sim_lock);
    return status;
}

SIM_API aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy)
{
    (void)policy;
    return allocate(devPtr, size, current_device);
}

SIM_API aclError aclrtMallocAlign32(void **devPtr, size_t size, aclrtMemMallocPolicy policy)
{
    return aclrtMalloc(devPtr, size, policy);
}

SIM_API aclError aclrtFree(void *devPtr)
{
    return release(devPtr);
}

SIM_API aclError aclrtMallocHost(void **hostPtr, size_t size)
{
    return allocate(hostPtr, size, -1);
}

SIM_API aclError aclrtMallocHostWithCfg(void **ptr, uint64_t size, aclrtMallocConfig *cfg)
{
    (void)cfg;
    return allocate(ptr, size, -1);
}

SIM_API aclError aclrtFreeHost(void *hostPtr)
{
    return release(hostPtr);
}

SIM_API aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total)
{
    (void)attr;
    pthread_mutex_lock(&sim_lock);
    *total = sim_controls()->memory_bytes;
    *free = *total > used_bytes[current_device] ? *total - used_bytes[current_device] : 0;
    pthread_mutex_unlock(&sim_lock);
    return ACL_SUCCESS;
}

SIM_API aclError aclrtPointerGetAttributes(const void *ptr, aclrtPtrAttributes *attributes)
{
    pthread_mutex_lock(&sim_lock);
    struct block *block = find_block(ptr);
    memset(attributes, 0, sizeof(*attributes));
    attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    if (block != NULL && block->device >= 0) {
        attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
        attributes->location.id = (uint32_t)block->device;
    } else if (block != NULL) {
        attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST;
    }
    pthread_mutex_unlock(&sim_lock);
    return ACL_SUCCESS;
}

/* Expandable segments: addresses are reserved first, and memory is put there piece by piece. */

SIM_API aclError aclrtReserveMemAddress(void **virPtr, size_t size, size_t alignment,
                                        void *expectPtr, uint64_t flags)
{
    (void)alignment, (void)expectPtr, (void)flags;
    /* The pages cost nothing before they are written, so they can be there from the start. */
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, kind, -1, 0);
    if (pages == MAP_FAILED) {
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    pthread_mutex_lock(&sim_lock);
    add_block(pages, size, current_device);
    pthread_mutex_unlock(&sim_lock);
    *virPtr = pages;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtReleaseMemAddress(void *virPtr)
{
    pthread_mutex_lock(&sim_lock);
    struct block *block = find_block(virPtr);
    if (block != NULL) {
        munmap(block->pointer, block->size);
        memset(block, 0, sizeof(*block));
    }
    pthread_mutex_unlock(&sim_lock);
    return block != NULL ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}

SIM_API aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size,
                                     const aclrtPhysicalMemProp *prop, uint64_t flags)
{
    (void)prop, (void)flags;
    pthread_mutex_lock(&sim_lock);
    bool is_taken = take_bytes(current_device, size);
    pthread_mutex_unlock(&sim_lock);
    if (!is_taken) {
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    struct physical *memory = malloc(sizeof(*memory));
    *memory = (struct physical){.size = size, .device = current_device};
    *handle = (aclrtDrvMemHandle)memory;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtFreePhysical(aclrtDrvMemHandle handle)
{
    struct physical *memory = (struct physical *)handle;

    pthread_mutex_lock(&sim_lock);
    used_bytes[memory->device] -= memory->size;
    pthread_mutex_unlock(&sim_lock);
    free(memory);
    return ACL_SUCCESS;
}

SIM_API aclError aclrtGetDeviceCount(uint32_t *count)
{
    *count = sim_num_devices();
    return ACL_SUCCESS;
}

SIM_API aclError aclrtGetDevice(int32_t *deviceId)
{
    *deviceId = current_device;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtSetDevice(int32_t deviceId)
{
    if (deviceId < 0 || (uint32_t)deviceId >= sim_num_devices()) {
        return ACL_ERROR_RT_INVALID_DEVICEID;
    }
    current_device = deviceId;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtGetCurrentContext(aclrtContext *context)
{
    static char contexts[SIM_MAX_DEVICES];

    *context = &contexts[current_device];
    return ACL_SUCCESS;
}
