/* What tests set and read: limits, errors on demand, and the notes of what was done. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim.h"

pthread_mutex_t sim_lock = PTHREAD_MUTEX_INITIALIZER;
static struct controls *controls;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The file NPU_SIM_CONTROLS is shared with the processes that name it too. */
static void map_controls(void)
{
    const char *path = getenv("NPU_SIM_CONTROLS");
    int file = path != NULL ? open(path, O_RDWR | O_CREAT, 0600) : -1;
    int flags = file >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;

    if (path != NULL && (file < 0 || ftruncate(file, sizeof(*controls)) != 0)) {
        abort();
    }
    controls = mmap(NULL, sizeof(*controls), PROT_READ | PROT_WRITE, flags, file, 0);
    if (controls == MAP_FAILED) {
        abort();
    }
    if (file >= 0) {
        close(file);
    }
    if (controls->memory_bytes == 0) {
        const char *memory = getenv("NPU_SIM_MEMORY_BYTES");
        controls->memory_bytes = memory != NULL ? strtoull(memory, NULL, 10) : 8ull << 30;
    }
}

SIM_API struct controls *sim_controls(void)
{
    pthread_once(&once, map_controls);
    return controls;
}

void sim_note_locked(uint32_t kind, uint32_t stream, uint64_t value, uint64_t bytes)
{
    struct controls *shared = sim_controls();

    if (!shared->is_recording) {
        return;
    }
    if (shared->num_notes < SIM_MAX_NOTES) {
        shared->notes[shared->num_notes] =
            (struct note){.kind = kind, .stream = stream, .value = value, .bytes = bytes};
    }
    shared->num_notes++;
}

SIM_API void sim_note(uint32_t kind, uint32_t stream, uint64_t value, uint64_t bytes)
{
    pthread_mutex_lock(&sim_lock);
    sim_note_locked(kind, stream, value, bytes);
    pthread_mutex_unlock(&sim_lock);
}
