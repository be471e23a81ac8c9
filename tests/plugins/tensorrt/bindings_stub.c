/* In the place of libnvinfer and its companions, for NVIDIA's Python bindings: every factory returns one object, and each
 * virtual function of that object returns the object again. Its address is such that it is also the number 1, `true`, and
 * a pointer to the text "x". So every call of a binding goes through its checks of names and types, and does nothing.
 * Classes of TensorRT hold a pointer to their implementation behind the pointer to their virtual functions; it is the
 * object itself. The memory for a result that is a structure (Dims) arrives as a first argument that is not the object:
 * it becomes two dimensions, 3 and 4, or 0 and 3 for TensorRT 8, whose dimensions have 32 bits.
 *
 * STUB_LOG (a text): factories log it as a warning and return nothing, as TensorRT does where CUDA does not start.
 * x86-64 alone: there the first register has the address of a result in memory. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGES ((char *)0x100000000)
#define OBJECT (PAGES + 1)
/* Its lowest bytes are 'x' and 0: read as a text at OBJECT, it is "x". */
#define TABLE (PAGES + 0x10078)
#define SLOTS 1000

static void *answer(void *first)
{
    if (first == OBJECT || first == NULL)
        return OBJECT;
    memcpy(first, (int64_t[]){2, 3, 4}, 3 * sizeof(int64_t));
    return first;
}

static void *make(void *logger)
{
    const char *text = getenv("STUB_LOG");
    if (text) {
        /* LOG is the number of log(Severity, text) among the virtual functions of ILogger. 2 is WARNING. */
        if (logger)
            ((void (*)(void *, int, const char *))(*(void ***)logger)[LOG])(logger, 2, text);
        return NULL;
    }
    if (*(void **)OBJECT == NULL) {
        void *table = TABLE;
        for (int i = 0; i < SLOTS; i++)
            ((void **)TABLE)[i] = (void *)answer;
        memcpy(OBJECT, &table, 8);
        memcpy(OBJECT + 8, (void *[]){OBJECT}, 8);
    }
    return OBJECT;
}

__attribute__((constructor)) static void map(void)
{
    /* Several of these libraries in one process share the object. */
    mmap(PAGES, 0x20000, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
}

void *createInferBuilder_INTERNAL(void *logger, int version) { (void)version; return make(logger); }
void *createInferRuntime_INTERNAL(void *logger, int version) { (void)version; return make(logger); }
void *createInferRefitter_INTERNAL(void *engine, void *logger, int version) { (void)engine, (void)version; return make(logger); }
void *createNvOnnxParser_INTERNAL(void *network, void *logger, int version) { (void)network, (void)version; return make(logger); }
void *createNvOnnxParserRefitter_INTERNAL(void *refitter, void *logger, int version) { (void)refitter, (void)version; return make(logger); }
void *getBuilderPluginRegistry(int capability) { (void)capability; return make(NULL); }
void *getPluginRegistry(void) { return make(NULL); }
_Bool initLibNvInferPlugins(void *logger, const char *names) { (void)logger; return names != NULL; }
int getNvOnnxParserVersion(void) { return 0; }
/* The two parsers of TensorRT 8 that nobody here uses. */
void *_ZN11nvuffparser15createUffParserEv(void) { return NULL; }
void _ZN11nvuffparser8FieldMapC1EPKcPKvNS_9FieldTypeEi(void) {}
void *_ZN14nvcaffeparser117createCaffeParserEv(void) { return NULL; }
void _ZN14nvcaffeparser123shutdownProtobufLibraryEv(void) {}
