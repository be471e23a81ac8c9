/* A small libnvidia-ml.so.1 whose GPUs are lines of a text file, read again at each call, so that any process can change
 * what they tell while another one watches them. The file's path is in the environment: FAKE_NVML_STATE.
 *
 *     init=0                         0, or the error that nvmlInit returns
 *     count=1
 *     0.name=NVIDIA Fake             a text
 *     0.temperature=65               a whole number, in the unit of the real call
 *     0.power=!15                    an error in place of the answer
 *
 * A metric without a line is not supported (3). A GPU that once said that it is lost (15) says so until nvmlInit.
 * Locked clocks are lines "0 MIN MAX" in the file FAKE_NVML_STATE.clocks; `0.lock=!4` refuses them.
 * Structures and numbers: nvml.h, docs.nvidia.com/deploy/nvml-api.
 */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_LOADED = 9, LOST = 15, OLD_STRUCT = 25 };
enum { MAX_GPUS = 16, MAX_BYTES = 1 << 16 };

typedef int result;
typedef struct { int index; } *device;

static struct { int index; } gpus[MAX_GPUS];
static int is_stuck[MAX_GPUS];
static int init_count;
static pid_t owner;

/* Copy the value of `key` into `value`; 0 when the file has no such line. */
static int look_up(const char *key, char *value, size_t size)
{
    static __thread char text[MAX_BYTES];
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file)
        return 0;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    size_t length = strlen(key);
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (!strncmp(line, key, length) && line[length] == '=') {
            snprintf(value, size, "%s", line + length + 1);
            return 1;
        }
    }
    return 0;
}

static long long number(const char *key, long long otherwise)
{
    char value[64];
    return look_up(key, value, sizeof value) ? strtoll(value, NULL, 0) : otherwise;
}

static result check_open(void)
{
    return init_count > 0 && owner == getpid() ? OK : UNINITIALIZED;
}

/* Copy what a GPU tells of a metric, or return its error. */
static result ask(device gpu, char *value, size_t size, const char *format, ...)
{
    char name[64], key[80];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(name, sizeof name, format, arguments);
    va_end(arguments);
    if (check_open())
        return UNINITIALIZED;
    if (!gpu || gpu->index < 0 || gpu->index >= MAX_GPUS)
        return INVALID;
    snprintf(key, sizeof key, "%d.lost", gpu->index);
    int lost = (int)number(key, 0);
    if (lost)
        is_stuck[gpu->index] = lost;
    if (is_stuck[gpu->index])
        return is_stuck[gpu->index];
    snprintf(key, sizeof key, "%d.%s", gpu->index, name);
    if (!look_up(key, value, size))
        return NOT_SUPPORTED;
    return value[0] == '!' ? atoi(value + 1) : OK;
}

static result ask_unsigned(device gpu, unsigned *into, const char *metric)
{
    char value[64];
    result code = ask(gpu, value, sizeof value, "%s", metric);
    if (code == OK)
        *into = (unsigned)strtoul(value, NULL, 0);
    return code;
}

static result ask_long(device gpu, unsigned long long *into, const char *metric)
{
    char value[64];
    result code = ask(gpu, value, sizeof value, "%s", metric);
    if (code == OK)
        *into = strtoull(value, NULL, 0);
    return code;
}

static result ask_numbered(device gpu, unsigned *into, const char *metric, unsigned which)
{
    char name[48];
    snprintf(name, sizeof name, "%s%u", metric, which);
    return ask_unsigned(gpu, into, name);
}

result nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    result code = (result)number("init", getenv("FAKE_NVML_STATE") ? OK : NOT_LOADED);
    if (code)
        return code;
    if (owner != getpid())
        init_count = 0;
    owner = getpid();
    init_count++;
    memset(is_stuck, 0, sizeof is_stuck);
    return OK;
}

result nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

result nvmlShutdown(void)
{
    if (check_open())
        return UNINITIALIZED;
    init_count--;
    return OK;
}

/* How many inits no shutdown has answered yet, for tests that look for leaks. */
int fake_nvml_open_count(void) { return owner == getpid() ? init_count : 0; }

const char *nvmlErrorString(result code)
{
    return code == 25 ? "Argument Version Mismatch" : code == 28 ? "GPU Not Found" : "Some Error";
}

result nvmlDeviceGetCount_v2(unsigned *count)
{
    result code = check_open();
    long long told = number("count", 0);
    if (!code && told < 0)
        return (result)-told;
    if (!code)
        *count = (unsigned)told;
    return code;
}

result nvmlDeviceGetHandleByIndex_v2(unsigned index, device *gpu)
{
    char key[32];
    if (check_open())
        return UNINITIALIZED;
    if (index >= MAX_GPUS || index >= number("count", 0))
        return INVALID;
    snprintf(key, sizeof key, "%u.handle", index);
    result code = (result)number(key, OK);
    gpus[index].index = (int)index;
    *gpu = (device)&gpus[index];
    return code;
}

result nvmlDeviceGetName(device gpu, char *name, unsigned length) { return ask(gpu, name, length, "name"); }
result nvmlDeviceGetUUID(device gpu, char *uuid, unsigned length) { return ask(gpu, uuid, length, "uuid"); }

struct temperature { unsigned version, sensor; int temperature; };

result nvmlDeviceGetTemperatureV(device gpu, struct temperature *told)
{
    unsigned value = 0;
    if (told->version != (1u << 24 | sizeof *told))
        return OLD_STRUCT;
    result code = ask_numbered(gpu, &value, "temperature", 0);
    told->temperature = (int)value;
    return code;
}

result nvmlDeviceGetTemperature(device gpu, unsigned sensor, unsigned *celsius)
{
    return ask_numbered(gpu, celsius, "temperature", sensor);
}

struct margin { unsigned version; int margin; };

result nvmlDeviceGetMarginTemperature(device gpu, struct margin *told)
{
    if (told->version != (1u << 24 | sizeof *told))
        return OLD_STRUCT;
    return ask_unsigned(gpu, (unsigned *)&told->margin, "margin");
}

result nvmlDeviceGetTemperatureThreshold(device gpu, unsigned which, unsigned *celsius)
{
    return ask_numbered(gpu, celsius, "threshold", which);
}

result nvmlDeviceGetPowerUsage(device gpu, unsigned *mw) { return ask_unsigned(gpu, mw, "power"); }
result nvmlDeviceGetEnforcedPowerLimit(device gpu, unsigned *mw) { return ask_unsigned(gpu, mw, "power_limit"); }

result nvmlDeviceGetPowerManagementLimit(device gpu, unsigned *mw)
{
    return ask_unsigned(gpu, mw, "management_limit");
}

result nvmlDeviceGetTotalEnergyConsumption(device gpu, unsigned long long *mj) { return ask_long(gpu, mj, "energy"); }

struct rates { unsigned gpu, memory; };

result nvmlDeviceGetUtilizationRates(device gpu, struct rates *rates)
{
    result code = ask_unsigned(gpu, &rates->gpu, "utilization");
    return code ? code : ask_unsigned(gpu, &rates->memory, "memory_utilization");
}

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

result nvmlDeviceGetMemoryInfo(device gpu, struct memory *memory)
{
    result code = ask_long(gpu, &memory->total, "memory_total");
    return code ? code : ask_long(gpu, &memory->used, "memory_used");
}

result nvmlDeviceGetMemoryInfo_v2(device gpu, struct memory_v2 *memory)
{
    if (memory->version != (2u << 24 | sizeof *memory))
        return OLD_STRUCT;
    result code = ask_long(gpu, &memory->total, "memory_total");
    return code ? code : ask_long(gpu, &memory->used, "memory_used");
}

result nvmlDeviceGetClockInfo(device gpu, unsigned type, unsigned *mhz) { return ask_numbered(gpu, mhz, "clock", type); }

result nvmlDeviceGetMaxClockInfo(device gpu, unsigned type, unsigned *mhz)
{
    return ask_numbered(gpu, mhz, "highest_clock", type);
}

result nvmlDeviceGetClock(device gpu, unsigned type, unsigned id, unsigned *mhz)
{
    (void)id;
    return ask_numbered(gpu, mhz, "target_clock", type);
}

result nvmlDeviceGetPerformanceState(device gpu, unsigned *state) { return ask_unsigned(gpu, state, "performance_state"); }
result nvmlDeviceGetFanSpeed(device gpu, unsigned *percent) { return ask_unsigned(gpu, percent, "fan"); }

result nvmlDeviceGetCurrentClocksEventReasons(device gpu, unsigned long long *bits)
{
    return ask_long(gpu, bits, "reasons");
}

result nvmlDeviceGetCurrentClocksThrottleReasons(device gpu, unsigned long long *bits)
{
    return ask_long(gpu, bits, "reasons");
}

struct violation { unsigned long long reference_us, violation_ns; };

result nvmlDeviceGetViolationStatus(device gpu, unsigned policy, struct violation *told)
{
    char name[32];
    snprintf(name, sizeof name, "violation%u", policy);
    return ask_long(gpu, &told->violation_ns, name);
}

struct field_value {
    uint32_t id, scope;
    int64_t at_us, latency_us;
    uint32_t type, code;
    unsigned long long value;
};

result nvmlDeviceGetFieldValues(device gpu, int count, struct field_value *values)
{
    char name[32];
    for (int index = 0; index < count; index++) {
        snprintf(name, sizeof name, "field%u", values[index].id);
        values[index].code = (uint32_t)ask_long(gpu, &values[index].value, name);
    }
    return check_open();
}

static result note_clocks(device gpu, unsigned low, unsigned high)
{
    char refusal[16], path[4096];
    result code = ask(gpu, refusal, sizeof refusal, "lock");
    if (code)
        return code;
    snprintf(path, sizeof path, "%s.clocks", getenv("FAKE_NVML_STATE"));
    FILE *file = fopen(path, "a");
    if (!file)
        return NOT_SUPPORTED;
    fprintf(file, "%d %u %u\n", gpu->index, low, high);
    fclose(file);
    return OK;
}

result nvmlDeviceSetGpuLockedClocks(device gpu, unsigned low, unsigned high) { return note_clocks(gpu, low, high); }
result nvmlDeviceResetGpuLockedClocks(device gpu) { return note_clocks(gpu, 0, 0); }
