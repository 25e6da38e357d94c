/* A stand-in for libnrt.so.1 that refuses what the public headers and pages of AWS do not allow.
 *
 * It runs NEFFs whose archive, which must not be compressed, has a member standin.txt: a program of elementwise float32
 * operations on named tensors (tests/runtime/devices/neff.py writes it). Everything else of the library is missing, so a
 * call that the product must not make fails when it is looked up.
 *
 * Environment, read when the library is loaded, as the real one reads its own:
 *   STANDIN_FAMILY        trn1, inf2, ...; unset: no device      STANDIN_CORES       cores of the instance (2)
 *   STANDIN_HBM           bytes of a core (1 MiB)                STANDIN_TIMEOUT_MS  of a wait for ranks (2000; 0: none)
 *   STANDIN_FOLDER        where processes meet; unset: alone     STANDIN_HANG        status of such a timeout (5)
 *   STANDIN_BUSY          wait: a second execute waits           STANDIN_BAD_INPUT   status of a wrong binding (1002)
 *   STANDIN_EARLY         status of a call before nrt_init (13)  STANDIN_INFO        unknown: no types; unused: dropped
 * STANDIN_FAULT=function=status is read at each call: the function returns the status.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MOST 64            /* tensors of a program, operations, cores, ranks */
#define SLOT 16384         /* bytes that a rank contributes to a collective */
#define NAME 256

enum { OK = 0, INVALID = 2, HANDLE = 3, RESOURCE = 4, HW_ERROR = 6, NOT_ENOUGH = 9, VERSION = 10, CLOSED = 14, BUSY = 1005,
       OOB = 1006 };

typedef struct { char name[NAME]; int usage; size_t size; int dtype; uint32_t *shape; uint32_t ndim; } Info;
typedef struct { uint64_t count; Info tensors[]; } Infos;
typedef struct { uint64_t major, minor, patch, maintenance; char detail[128], hash[64]; } Version;
typedef struct { uint32_t family, size; char arch[16], revision[8]; } Instance;
typedef struct { size_t used, limit; } Memory;
typedef struct { uint64_t physical; size_t size; int hbm; } Allocation;

_Static_assert(sizeof(Info) == 296 && offsetof(Info, usage) == 256 && offsetof(Info, size) == 264, "tensor info");
_Static_assert(offsetof(Info, dtype) == 272 && offsetof(Info, shape) == 280 && offsetof(Info, ndim) == 288, "tensor info");
_Static_assert(offsetof(Infos, tensors) == 8, "tensor info array");
_Static_assert(sizeof(Version) == 224 && offsetof(Version, detail) == 32 && offsetof(Version, hash) == 160, "version");
_Static_assert(sizeof(Instance) == 32 && sizeof(Memory) == 16 && sizeof(Allocation) == 24, "other structures");

API size_t standin_size(const char *name) {
    if (!strcmp(name, "tensor_info")) return sizeof(Info);
    if (!strcmp(name, "version")) return sizeof(Version);
    if (!strcmp(name, "instance")) return sizeof(Instance);
    if (!strcmp(name, "memory")) return sizeof(Memory);
    return 0;
}

/* Settings */

static struct { char family[16], folder[512], visible[64], root[128], info[16]; long cores, hbm, timeout, hang, bad, early, lnc;
                int waits; } settings;

static void text(char *into, size_t size, const char *name) {
    const char *value = getenv(name);
    snprintf(into, size, "%s", value ? value : "");
}
static long number(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? atol(value) : otherwise;
}
__attribute__((constructor)) static void read_environment(void) {
    text(settings.family, sizeof settings.family, "STANDIN_FAMILY");
    text(settings.folder, sizeof settings.folder, "STANDIN_FOLDER");
    text(settings.visible, sizeof settings.visible, "NEURON_RT_VISIBLE_CORES");
    text(settings.root, sizeof settings.root, "NEURON_RT_ROOT_COMM_ID");
    text(settings.info, sizeof settings.info, "STANDIN_INFO");
    settings.cores = number("STANDIN_CORES", 2);
    settings.hbm = number("STANDIN_HBM", 1 << 20);
    settings.timeout = number("STANDIN_TIMEOUT_MS", 2000);
    settings.hang = number("STANDIN_HANG", 5);
    settings.bad = number("STANDIN_BAD_INPUT", 1002);
    settings.early = number("STANDIN_EARLY", 13);
    settings.lnc = number("NEURON_RT_VIRTUAL_CORE_SIZE", 1);
    settings.waits = getenv("STANDIN_BUSY") && !strcmp(getenv("STANDIN_BUSY"), "wait");
}

/* State: before nrt_init, open, closed */

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static enum { BEFORE, OPEN, SHUT } state;
static long visible;                       /* cores of this process */
static size_t used[MOST];
static pthread_mutex_t running[MOST];
static int violations, live_infos;

API int standin_violations(void) { return violations; }

static void violate(const char *what) {
    fprintf(stderr, "NRT stand-in: %s\n", what);
    violations++;
}
static int injected(const char *function) {
    const char *fault = getenv("STANDIN_FAULT");
    size_t length = strlen(function);
    return fault && !strncmp(fault, function, length) && fault[length] == '=' ? atoi(fault + length + 1) : OK;
}
static int enter(const char *function) {
    int status = injected(function);
    return status ? status : state == BEFORE ? (int)settings.early : state == SHUT ? CLOSED : OK;
}
#define ENTER() do { int status_ = enter(__func__); if (status_) return status_; } while (0)

/* Objects: a handle is valid while it is in this list */

typedef enum { TENSOR, SET, MODEL } Kind;
typedef struct Object { Kind kind; struct Object *next; } Object;
static Object *objects;

static void *make(Kind kind, size_t size) {
    Object *made = calloc(1, size);
    made->kind = kind;
    pthread_mutex_lock(&registry);
    made->next = objects, objects = made;
    pthread_mutex_unlock(&registry);
    return made;
}
static int is_live(const void *handle, Kind kind) {
    pthread_mutex_lock(&registry);
    Object *at = objects;
    while (at && at != handle) at = at->next;
    pthread_mutex_unlock(&registry);
    return at && at->kind == kind;
}
static void drop(void *handle) {
    pthread_mutex_lock(&registry);
    for (Object **at = &objects; *at; at = &(*at)->next)
        if (*at == handle) { *at = (*at)->next; break; }
    pthread_mutex_unlock(&registry);
    free(handle);
}

/* Memory of cores */

typedef struct { int owners, core; size_t size; unsigned char *bytes; } Storage;
typedef struct { Object object; char name[NAME]; Storage *storage; size_t offset, size; } Tensor;
typedef struct { Object object; int count; char names[MOST][NAME]; Tensor *tensors[MOST]; } Set;

static int take(int core, size_t size) {
    pthread_mutex_lock(&registry);
    int fits = size <= (size_t)settings.hbm - used[core];
    if (fits) used[core] += size;
    pthread_mutex_unlock(&registry);
    return fits;
}
static void give(int core, size_t size) {
    pthread_mutex_lock(&registry);
    used[core] -= size;
    pthread_mutex_unlock(&registry);
}
static void release(Storage *storage) {
    if (--storage->owners) return;
    give(storage->core, storage->size);
    free(storage->bytes), free(storage);
}
static unsigned char *bytes_of(const Tensor *tensor) { return tensor->storage->bytes + tensor->offset; }
static int is_in_set(const Tensor *tensor) {
    int found = 0;
    pthread_mutex_lock(&registry);
    for (Object *at = objects; at; at = at->next)
        if (at->kind == SET)
            for (int i = 0; i < ((Set *)at)->count; i++) found |= ((Set *)at)->tensors[i] == tensor;
    pthread_mutex_unlock(&registry);
    return found;
}

/* Ranks meet in a file that all of them map */

typedef struct { atomic_ullong joined; atomic_uint arrived, round; char slots[MOST][SLOT]; } Meeting;

static Meeting *meeting_of(const char *key) {
    static char alone[MOST][NAME];
    static Meeting *made[MOST];
    char path[1024];
    if (!*settings.folder) {  /* one process: its threads meet in its memory */
        pthread_mutex_lock(&registry);
        int at = 0;
        while (at < MOST - 1 && made[at] && strcmp(alone[at], key)) at++;
        if (!made[at]) made[at] = calloc(1, sizeof(Meeting)), snprintf(alone[at], NAME, "%s", key);
        pthread_mutex_unlock(&registry);
        return made[at];
    }
    snprintf(path, sizeof path, "%s/meeting-%s", settings.folder, key);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Meeting))) return NULL;
    void *mapped = mmap(NULL, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return mapped == MAP_FAILED ? NULL : mapped;
}
static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}
static int keep_waiting(int64_t *begun) {         /* 0 once the time is over */
    if (!*begun) *begun = now_ms();
    usleep(300);
    return !settings.timeout || now_ms() - *begun <= settings.timeout;
}

static int meet(Meeting *meeting, unsigned world) {
    unsigned round = atomic_load(&meeting->round);
    if (atomic_fetch_add(&meeting->arrived, 1) + 1 == world) {
        atomic_store(&meeting->arrived, 0);
        atomic_fetch_add(&meeting->round, 1);
        return OK;
    }
    for (int64_t begun = 0; atomic_load(&meeting->round) == round;)
        if (!keep_waiting(&begun)) return (int)settings.hang;
    return OK;
}

/* Programs */

typedef struct { char word[16], a[NAME], b[NAME], c[NAME]; } Operation;
typedef struct { char name[NAME]; size_t size; int dtype; uint32_t shape[8], rank; int is_output; } Declared;
typedef struct { Object object; int core; uint32_t rank, world; size_t memory; int tensors, operations;
                 Declared declared[MOST]; Operation code[MOST]; Meeting *meeting; char profile[512]; } Model;

static const char *const DTYPES[] = {"unknown", "uint64", "int8", "uint8", "int16", "uint16", "bfloat16", "float16", "int32",
    "uint32", "float32", "fp32r", "int64", "float8_e3", "float8_e4", "float8_e5"};

static int dtype_of(const char *name) {
    if (!strcmp(name, "pred")) return 3;          /* reported as uint8 */
    if (!strncmp(name, "float8", 6)) return 2;    /* reported as int8 */
    for (int i = 0; i < 16; i++) if (!strcmp(name, DTYPES[i])) return i;
    return 0;
}
static const char *base(const char *name) { return *name == '@' ? name + 1 : name; }   /* @x: the output x */
static int is_read(Model *model, const char *name) {
    for (int i = 0; i < model->operations; i++)
        if (!strcmp(model->code[i].b, name) || !strcmp(model->code[i].c, name)) return 1;
    return 0;
}
static int parse_tensor(Model *model, char *line) {
    char role[16], dtype[32];
    int at = 0, more;
    unsigned axis;
    if (model->tensors == MOST) return INVALID;
    Declared *tensor = &model->declared[model->tensors];
    if (sscanf(line, "%15s %255s %zu %31s%n", role, tensor->name, &tensor->size, dtype, &at) != 4) return INVALID;
    tensor->is_output = !strcmp(role, "output");
    tensor->dtype = dtype_of(dtype);
    for (line += at; tensor->rank < 8 && sscanf(line, "%u%n", &axis, &more) == 1; line += more)
        tensor->shape[tensor->rank++] = axis;
    model->tensors += tensor->size > 0;           /* compilers drop outputs of 0 bytes */
    return OK;
}
static int parse(Model *model, char *source) {
    char *rest = NULL, value[32];
    size_t scratch;
    unsigned world;
    for (char *line = strtok_r(source, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (sscanf(line, "arch %31s", value) == 1) {
            if (strcmp(value, settings.family)) return HW_ERROR;   /* documented as NRT_FAILURE(6) */
        } else if (sscanf(line, "world %u", &world) == 1) {
            if (world != model->world) return INVALID;
        } else if (sscanf(line, "scratch %zu", &scratch) == 1) {
            model->memory += scratch;
        } else if (!strncmp(line, "op ", 3)) {
            if (model->operations == MOST) return INVALID;
            Operation *op = &model->code[model->operations++];
            if (sscanf(line, "op %15s %255s %255s %255s", op->word, op->a, op->b, op->c) < 2) return INVALID;
        } else if (parse_tensor(model, line)) return INVALID;
    }
    if (strstr(settings.info, "unused"))
        for (int i = 0; i < model->tensors; i++)
            if (!model->declared[i].is_output && !is_read(model, model->declared[i].name))
                model->declared[i--] = model->declared[--model->tensors];
    return OK;
}
static int member(const unsigned char *body, size_t size, const char *name, const char **found, size_t *length) {
    *found = NULL;
    for (size_t at = 0; at + 512 <= size;) {
        const char *header = (const char *)body + at;
        if (!*header) return *found ? OK : INVALID;
        size_t bytes = strtoul(header + 124, NULL, 8);
        if (at + 512 + bytes > size) return INVALID;
        if (!strcmp(header, name)) *found = header + 512, *length = bytes;
        at += 512 + (bytes + 511) / 512 * 512;
    }
    return INVALID;                               /* the archive has no end */
}
static int read_neff(Model *model, const unsigned char *neff, size_t size) {
    uint64_t header[5];
    uint32_t lnc;
    const char *source = NULL, *other = NULL;
    size_t length = 0, unread;
    if (size < 1024) return INVALID;
    memcpy(header, neff, sizeof header), memcpy(&lnc, neff + 552, 4);
    if (header[0] != 2 || header[1] != 1024 || header[2] != size - 1024) return INVALID;
    if (header[3] != 2) return VERSION;
    if (lnc != settings.lnc) return INVALID;
    if (member(neff + 1024, size - 1024, "kelf-0.json", &other, &unread)) return INVALID;
    if (member(neff + 1024, size - 1024, "sg00/def.json", &other, &unread)) return INVALID;
    if (member(neff + 1024, size - 1024, "standin.txt", &source, &length)) return INVALID;
    char *copy = strndup(source, length);
    model->memory = length;
    int status = parse(model, copy);
    free(copy);
    return status;
}

static uint64_t digest(const unsigned char *bytes, size_t size) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < size; i++) hash = (hash ^ bytes[i]) * 1099511628211u;
    return hash;
}
static int free_core(void) {
    for (int core = 0; core < visible; core++) {
        int is_free = 1;
        for (Object *at = objects; at; at = at->next) is_free &= !(at->kind == MODEL && ((Model *)at)->core == core);
        if (is_free) return core;
    }
    return -1;
}
static int load(const void *neff, size_t size, int32_t core, uint32_t rank, uint32_t world, Model **into) {
    if (!neff || !into || !world || world > MOST || rank >= world) return INVALID;
    if (core == -1 && (core = free_core()) < 0) return NOT_ENOUGH;
    if (core < 0 || core >= visible) return INVALID;
    Model *model = make(MODEL, sizeof(Model));
    model->core = core, model->rank = rank, model->world = world;
    int status = read_neff(model, neff, size);
    if (!status && !take(core, model->memory)) status = RESOURCE;
    if (status) return drop(model), status;
    *into = model;
    return OK;
}

/* The interface */

API int nrt_init(int framework, const char *version, const char *fal) {
    int status = injected(__func__);
    if (status) return status;
    if (state == OPEN || state == SHUT) return violate("nrt_init was called twice in one process"), 1;
    if (framework != 1 || !version || !fal || !*settings.family) return INVALID;
    long first = 0, last = settings.cores - 1, cores[2] = {0, 0};
    if (*settings.visible) {
        char *rest = settings.visible;
        for (long next = -1; *rest;) {
            cores[0] = strtol(rest, &rest, 10), cores[1] = *rest == '-' ? strtol(rest + 1, &rest, 10) : cores[0];
            if (next >= 0 && cores[0] != next) return INVALID;    /* with a gap, or decreasing */
            if (next < 0) first = cores[0];
            last = cores[1], next = last + 1;
            rest += *rest == ',';
        }
    }
    if (last >= settings.cores || last < first) return NOT_ENOUGH;
    for (long core = first; *settings.folder && core <= last; core++) {   /* a core belongs to one process */
        char path[1024];
        snprintf(path, sizeof path, "%s/core-%ld", settings.folder, core);
        int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (file < 0 || flock(file, LOCK_EX | LOCK_NB)) {
            fprintf(stderr, "NRT NeuronCore(s) not available - Requested:nc%ld-nc%ld Available:0\n", first, last);
            return NOT_ENOUGH;
        }
    }
    visible = last - first + 1;
    for (int core = 0; core < MOST; core++) pthread_mutex_init(&running[core], NULL);
    state = OPEN;
    return OK;
}
API void nrt_close(void) {
    if (state != OPEN) { violate("nrt_close without an open runtime"); return; }
    if (objects || live_infos) violate("tensors, sets, models or tensor infos are alive at nrt_close");
    state = SHUT;
}
static int counted(uint32_t *count, long cores) { return count ? (*count = (uint32_t)cores, OK) : INVALID; }
API int nrt_get_total_nc_count(uint32_t *count) { return counted(count, *settings.family ? settings.cores : 0); }
API int nrt_get_total_vnc_count(uint32_t *count) { return nrt_get_total_nc_count(count); }
API int nrt_get_visible_nc_count(uint32_t *count) { ENTER(); return counted(count, visible); }
API int nrt_get_visible_vnc_count(uint32_t *count) { ENTER(); return counted(count, visible); }
API int nrt_get_version(Version *version, size_t size) {
    if (!version || size != sizeof *version) return INVALID;
    *version = (Version){2, 34, 10, 0, "stand-in", "0"};
    return OK;
}
API int nrt_get_instance_info(Instance *info, size_t size) {
    static const char *const FAMILIES[] = {"", "inf1", "trn1", "trn1n", "inf2", "trn2"};
    ENTER();
    if (!info || size != sizeof *info) return INVALID;
    memset(info, 0, sizeof *info);
    for (uint32_t i = 1; i < 6; i++) if (!strcmp(FAMILIES[i], settings.family)) info->family = i;
    return OK;
}
API int nrt_get_vnc_memory_stats(uint32_t core, Memory *stats, size_t size, size_t *written) {
    ENTER();
    if (core >= visible || !stats || size != sizeof *stats || !written) return INVALID;
    *stats = (Memory){used[core], (size_t)settings.hbm}, *written = sizeof *stats;
    return OK;
}

API int nrt_load(const void *neff, size_t size, int32_t core, int32_t count, Model **into) {
    ENTER();
    return count != 1 && count != -1 ? INVALID : load(neff, size, core, 0, 1, into);
}
API int nrt_load_collectives(const void *neff, size_t size, int32_t core, int32_t count, uint32_t rank, uint32_t world,
                             Model **into) {
    ENTER();
    char *port = strrchr(settings.root, ':'), key[NAME];
    if (!port || count != 1) return INVALID;      /* NEURON_RT_ROOT_COMM_ID=HOST:PORT is mandatory */
    int status = load(neff, size, core, rank, world, into);
    if (status) return status;
    Model *model = *into;
    *into = NULL;
    snprintf(key, sizeof key, "%s-%016llx-%u", port + 1, (unsigned long long)digest(neff, size), world);
    model->meeting = meeting_of(key);
    unsigned long long own = 1ull << rank, all = world == 64 ? ~0ull : (1ull << world) - 1;
    if (!model->meeting || atomic_fetch_or(&model->meeting->joined, own) & own) status = INVALID;
    for (int64_t begun = 0; !status && (atomic_load(&model->meeting->joined) & all) != all;)
        if (!keep_waiting(&begun)) atomic_fetch_and(&model->meeting->joined, ~own), status = (int)settings.hang;
    if (status) return give(model->core, model->memory), drop(model), status;
    *into = model;
    return OK;
}
API int nrt_unload(Model *model) {
    ENTER();
    if (!is_live(model, MODEL)) return HANDLE;
    int core = model->core;
    pthread_mutex_lock(&running[core]);
    if (model->meeting) atomic_fetch_and(&model->meeting->joined, ~(1ull << model->rank));
    give(core, model->memory);
    drop(model);
    pthread_mutex_unlock(&running[core]);
    return OK;
}
API int nrt_get_model_tensor_info(Model *model, Infos **into) {
    ENTER();
    if (!is_live(model, MODEL) || !into) return HANDLE;
    Infos *infos = calloc(1, sizeof(Infos) + (size_t)model->tensors * sizeof(Info));
    infos->count = (uint64_t)model->tensors;
    for (int i = 0; i < model->tensors; i++) {    /* in another order than the program's */
        Declared *tensor = &model->declared[model->tensors - 1 - i];
        Info *info = &infos->tensors[(i + 1) % model->tensors];
        int is_unknown = strstr(settings.info, "unknown") != NULL;
        memcpy(info->name, tensor->name, NAME);
        info->usage = tensor->is_output, info->size = tensor->size;
        info->dtype = is_unknown ? 0 : tensor->dtype, info->ndim = is_unknown ? 0 : tensor->rank;
        info->shape = is_unknown ? NULL : malloc(sizeof tensor->shape);
        if (info->shape) memcpy(info->shape, tensor->shape, sizeof tensor->shape);
    }
    live_infos++;
    *into = infos;
    return OK;
}
API int nrt_free_model_tensor_info(Infos *infos) {
    if (!infos) return INVALID;
    for (uint64_t i = 0; i < infos->count; i++) free(infos->tensors[i].shape);
    free(infos);
    live_infos--;
    return OK;
}

API int nrt_tensor_allocate(int placement, int core, size_t size, const char *name, Tensor **into) {
    ENTER();
    if (placement || core < 0 || core >= visible || !size || !into || (name && strlen(name) >= NAME)) return INVALID;
    if (!take(core, size)) {
        fprintf(stderr, "Failed to allocate %zu (usage: tensors) on ND 0:NC %d\n", size, core);
        return RESOURCE;
    }
    Tensor *tensor = make(TENSOR, sizeof *tensor);
    snprintf(tensor->name, NAME, "%s", name ? name : "");
    tensor->size = size;
    tensor->storage = malloc(sizeof(Storage));
    *tensor->storage = (Storage){1, core, size, malloc(size)};
    memset(tensor->storage->bytes, 0xFF, size);   /* undefined content: NaN */
    *into = tensor;
    return OK;
}
static int is_inside(const Tensor *tensor, uint64_t offset, size_t size) {
    return offset <= tensor->size && size <= tensor->size - offset;
}
API int nrt_tensor_allocate_slice(const Tensor *source, size_t offset, size_t size, const char *name, Tensor **into) {
    ENTER();
    if (!is_live(source, TENSOR)) return HANDLE;
    if (!size || !is_inside(source, offset, size) || !into) return INVALID;
    Tensor *tensor = make(TENSOR, sizeof *tensor);
    snprintf(tensor->name, NAME, "%s", name ? name : "");
    tensor->storage = source->storage, tensor->offset = source->offset + offset, tensor->size = size;
    tensor->storage->owners++;
    *into = tensor;
    return OK;
}
API void nrt_tensor_free(Tensor **tensor) {
    if (state != OPEN || !tensor || !is_live(*tensor, TENSOR)) { violate("nrt_tensor_free of no tensor"); return; }
    if (is_in_set(*tensor)) violate("a tensor is freed before the set that contains it");
    release((*tensor)->storage);
    drop(*tensor);
    *tensor = NULL;
}
API int nrt_tensor_read(const Tensor *tensor, void *into, size_t offset, size_t size) {
    ENTER();
    if (!is_live(tensor, TENSOR)) return HANDLE;
    if (!into || !is_inside(tensor, offset, size)) return INVALID;
    memcpy(into, bytes_of(tensor) + offset, size);
    return OK;
}
API int nrt_tensor_write(Tensor *tensor, const void *from, size_t offset, size_t size) {
    ENTER();
    if (!is_live(tensor, TENSOR)) return HANDLE;
    if (!from || !is_inside(tensor, offset, size)) return INVALID;
    memcpy(bytes_of(tensor) + offset, from, size);
    return OK;
}
API int nrt_tensor_copy(const Tensor *from, size_t from_offset, Tensor *to, size_t to_offset, size_t size) {
    ENTER();
    if (!is_live(from, TENSOR) || !is_live(to, TENSOR)) return HANDLE;
    if (from->storage->core != to->storage->core) return INVALID;
    if (!is_inside(from, from_offset, size) || !is_inside(to, to_offset, size)) return INVALID;
    memmove(bytes_of(to) + to_offset, bytes_of(from) + from_offset, size);
    return OK;
}
API int nrt_tensor_memset(Tensor *tensor, uint64_t offset, int value, size_t size) {
    ENTER();
    if (!is_live(tensor, TENSOR)) return HANDLE;
    if (!is_inside(tensor, offset, size)) return INVALID;
    memset(bytes_of(tensor) + offset, value, size);
    return OK;
}
API size_t nrt_tensor_get_size(const Tensor *tensor) { return is_live(tensor, TENSOR) ? tensor->size : 0; }

API int nrt_allocate_tensor_set(Set **into) {
    ENTER();
    return into ? (*into = make(SET, sizeof(Set)), OK) : INVALID;
}
API void nrt_destroy_tensor_set(Set **set) {
    if (state != OPEN || !set || !is_live(*set, SET)) { violate("nrt_destroy_tensor_set of no set"); return; }
    drop(*set);
    *set = NULL;
}
static int index_in(const Set *set, const char *name) {
    for (int i = 0; i < set->count; i++) if (!strcmp(set->names[i], name)) return i;
    return -1;
}
API int nrt_add_tensor_to_tensor_set(Set *set, const char *name, Tensor *tensor) {
    ENTER();
    if (!is_live(set, SET) || !is_live(tensor, TENSOR)) return HANDLE;
    if (!name || strlen(name) >= NAME) return INVALID;
    int at = index_in(set, name);
    if (at < 0 && (at = set->count) == MOST) return RESOURCE;
    set->count += at == set->count;
    snprintf(set->names[at], NAME, "%s", name);
    set->tensors[at] = tensor;
    return OK;
}
API int nrt_get_tensor_from_tensor_set(Set *set, const char *name, Tensor **into) {
    ENTER();
    if (!is_live(set, SET)) return HANDLE;
    int at = name ? index_in(set, name) : -1;
    return at < 0 || !into ? 1 : (*into = set->tensors[at], OK);
}

static int bindings(Model *model, const Set *set, int is_output) {
    int needed = 0;
    for (int i = 0; i < model->tensors; i++) {
        if (model->declared[i].is_output != is_output) continue;
        int at = index_in(set, model->declared[i].name);
        needed++;
        if (at < 0) return (int)settings.bad;
        if (!is_live(set->tensors[at], TENSOR)) return HANDLE;
        if (set->tensors[at]->size != model->declared[i].size) return (int)settings.bad;
        if (set->tensors[at]->storage->core != model->core) return INVALID;
    }
    return needed == set->count ? OK : (int)settings.bad;
}
static Tensor *operand(const char *name, const Set *in, const Set *out) {
    const Set *set = *name == '@' ? out : in;
    int at = index_in(set, base(name));
    return at < 0 ? NULL : set->tensors[at];
}
static int gather(Tensor *to, const Tensor *table, const Tensor *ids) {
    size_t count = ids->size / 4, row = to->size / count;
    for (size_t i = 0; i < count; i++) {
        int32_t id = ((const int32_t *)bytes_of(ids))[i];
        if (id < 0 || (size_t)id >= table->size / row) return OOB;
        memcpy(bytes_of(to) + i * row, bytes_of(table) + (size_t)id * row, row);
    }
    return OK;
}
static int all_reduce(Model *model, Tensor *to, const Tensor *from) {
    float sums[SLOT / 4] = {0};
    if (from->size > SLOT || to->size != from->size) return INVALID;
    if (model->world == 1) return memmove(bytes_of(to), bytes_of(from), to->size), OK;
    memcpy(model->meeting->slots[model->rank], bytes_of(from), from->size);
    int status = meet(model->meeting, model->world);
    for (uint32_t rank = 0; !status && rank < model->world; rank++)
        for (size_t i = 0; i < from->size / 4; i++) sums[i] += ((float *)model->meeting->slots[rank])[i];
    if (status) return status;
    memcpy(bytes_of(to), sums, to->size);
    return meet(model->meeting, model->world);
}
static int operate(Model *model, const Operation *op, const Set *in, const Set *out) {
    if (!strcmp(op->word, "sleep")) return usleep((useconds_t)atoi(op->a) * 1000), OK;
    if (!strcmp(op->word, "hang")) {
        while ((uint32_t)atoi(op->a) == model->rank) pause();
        return OK;
    }
    Tensor *to = operand(op->a, out, out), *a = operand(op->b, in, out), *b = operand(op->c, in, out);
    if (!to || !a) return INVALID;
    float *z = (float *)bytes_of(to), *x = (float *)bytes_of(a), *y = b ? (float *)bytes_of(b) : NULL;
    size_t count = to->size / 4;
    if (!strcmp(op->word, "allreduce")) return all_reduce(model, to, a);
    if (!strcmp(op->word, "gather")) return b ? gather(to, a, b) : INVALID;
    if (!strcmp(op->word, "update")) {            /* write b into a part of the output: update z x OFFSET */
        size_t offset = (size_t)atol(op->c);
        return is_inside(to, offset, a->size) ? (memmove(bytes_of(to) + offset, x, a->size), OK) : INVALID;
    }
    if (a->size != to->size || (b && b->size != to->size)) return INVALID;
    if (!strcmp(op->word, "copy")) memmove(z, x, to->size);
    else if (!strcmp(op->word, "scale")) for (size_t i = 0; i < count; i++) z[i] = x[i] * (float)atof(op->c);
    else if (!strcmp(op->word, "add") && b) for (size_t i = 0; i < count; i++) z[i] = x[i] + y[i];
    else if (!strcmp(op->word, "mul") && b) for (size_t i = 0; i < count; i++) z[i] = x[i] * y[i];
    else return INVALID;
    return OK;
}
API int nrt_execute(Model *model, const Set *in, Set *out) {
    ENTER();
    if (!is_live(model, MODEL) || !is_live(in, SET) || !is_live(out, SET)) return HANDLE;
    int status = bindings(model, in, 0);
    if (!status) status = bindings(model, out, 1);
    if (status) return status;
    if (settings.waits) pthread_mutex_lock(&running[model->core]);
    else if (pthread_mutex_trylock(&running[model->core])) return BUSY;
    for (int i = 0; !status && i < model->operations; i++) status = operate(model, &model->code[i], in, out);
    pthread_mutex_unlock(&running[model->core]);
    return status;
}
API int nrt_barrier(int32_t core, uint32_t rank, uint32_t world) {
    ENTER();
    if (core < 0 || core >= visible || rank >= world || !*settings.root) return INVALID;
    Meeting *meeting = meeting_of("barrier");
    return meeting ? meet(meeting, world) : INVALID;
}
API int nrt_profile_start(Model *model, const char *path) {
    ENTER();
    if (!is_live(model, MODEL) || !path || *model->profile) return INVALID;
    snprintf(model->profile, sizeof model->profile, "%s", path);
    return OK;
}
API int nrt_profile_stop(const char *path) {
    ENTER();
    for (Object *at = objects; at && path; at = at->next)
        if (at->kind == MODEL && !strcmp(((Model *)at)->profile, path)) {
            FILE *file = fopen(path, "wb");
            *((Model *)at)->profile = 0;
            return file ? (fputs("NTFF", file), fclose(file), OK) : INVALID;
        }
    return INVALID;
}
