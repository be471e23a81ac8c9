/* A library that breaks one rule of edge_backend.h at a time, by -DRULE=name: what the server makes of each. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "edge_backend.h"

#define NONE 0
#define VERSION 1
#define NO_RUN 2
#define NO_HANDLE 3
#define OPEN_FAILS 4
#define DESCRIBE_FAILS 5
#define NO_LIST 6
#define BAD_TYPE 7
#define BAD_RANK 8

struct edge_model {
  const char* mode;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int waiting = 0;

uint32_t edge_backend_abi_version(void) { return RULE == VERSION ? 7u : EDGE_BACKEND_ABI_VERSION; }

int32_t edge_model_open(const edge_open_args* args, edge_model** model, edge_text* error) {
  if (RULE == NO_HANDLE) return 0;
  if (RULE == OPEN_FAILS) {
    memset(error->data, 'x', error->capacity); /* and no zero at the end */
    return 5;
  }
  struct edge_model* made = malloc(sizeof *made);
  made->mode = "";
  for (uint32_t i = 0; i < args->parameter_count; ++i) {
    if (strcmp(args->parameter_keys[i], "mode") == 0) made->mode = strdup(args->parameter_values[i]);
  }
  *model = made;
  return 0;
}

int32_t edge_model_describe(edge_model* model, const edge_tensor_spec** inputs, uint32_t* input_count,
                            const edge_tensor_spec** outputs, uint32_t* output_count, edge_text* error) {
  static const int64_t dims[] = {-1};
  static edge_tensor_spec given, made;
  given = (edge_tensor_spec){"X", RULE == BAD_TYPE ? 99 : EDGE_INT32, RULE == BAD_RANK ? 4000000 : 1, dims};
  made = (edge_tensor_spec){"Y", EDGE_INT32, 1, dims};
  (void)model;
  (void)error;
  *inputs = RULE == NO_LIST ? NULL : &given;
  *outputs = &made;
  *input_count = *output_count = 1;
  return RULE == DESCRIBE_FAILS ? 3 : 0;
}

static void* ask(const edge_run_args* args, const char* name, int32_t type, int32_t rank, const int64_t* dims,
                 uint64_t bytes) {
  return args->allocate(args->context, name, type, rank, dims, bytes);
}

/* Returns once as many runs as `count` are inside at the same time. */
static void meet(int count) {
  pthread_mutex_lock(&lock);
  ++waiting;
  pthread_cond_broadcast(&changed);
  while (waiting % count != 0) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
}

static int32_t run(edge_model* model, const edge_run_args* args, edge_text* error) {
  const char* mode = model->mode;
  const edge_tensor* x = args->inputs;
  const int64_t minus[] = {-4}, longer[] = {x->dims[0] + 1}, huge[] = {(int64_t)1 << 60}, pair[] = {x->dims[0], 1};
  const int64_t one[] = {1};
  if (strcmp(mode, "fails") == 0) {
    strncpy(error->data, "the sensor\n  is dark", error->capacity);
    return 1;
  }
  if (strcmp(mode, "silent") == 0) return 42;
  if (strcmp(mode, "missing") == 0) return 0;
  if (strcmp(mode, "unknown") == 0) ask(args, "Z", EDGE_INT32, 1, x->dims, x->byte_size);
  if (strcmp(mode, "nameless") == 0) ask(args, NULL, EDGE_INT32, 1, x->dims, x->byte_size);
  if (strcmp(mode, "type") == 0) ask(args, "Y", 99, 1, x->dims, x->byte_size);
  if (strcmp(mode, "rank") == 0) ask(args, "Y", EDGE_INT32, -1, x->dims, x->byte_size);
  if (strcmp(mode, "no dims") == 0) ask(args, "Y", EDGE_INT32, 1, NULL, x->byte_size);
  if (strcmp(mode, "minus") == 0) ask(args, "Y", EDGE_INT32, 1, minus, 16);
  if (strcmp(mode, "short") == 0) ask(args, "Y", EDGE_INT32, 1, longer, x->byte_size);
  if (strcmp(mode, "huge") == 0) ask(args, "Y", EDGE_INT32, 1, huge, (uint64_t)1 << 62);
  if (strcmp(mode, "longer") == 0) return ask(args, "Y", EDGE_INT32, 1, longer, x->byte_size + 4) == NULL;
  if (strcmp(mode, "wider") == 0) return ask(args, "Y", EDGE_INT32, 2, pair, x->byte_size) == NULL;
  if (strcmp(mode, "floats") == 0) return ask(args, "Y", EDGE_FP32, 1, x->dims, x->byte_size) == NULL;
  if (strcmp(mode, "strings") == 0) {
    memset(ask(args, "Y", EDGE_BYTES, 1, one, 6), 0x7f, 6);
    return 0;
  }
  if (strcmp(mode, "crowd") == 0) {
    memset(ask(args, "Y", EDGE_BYTES, 1, huge, 8), 0, 8);
    return 0;
  }
  if (strcmp(mode, "meet") == 0) meet(2);
  void* memory = ask(args, "Y", EDGE_INT32, 1, x->dims, x->byte_size);
  if (memory != NULL && strcmp(mode, "unwritten") != 0) memcpy(memory, x->data, x->byte_size);
  if (strcmp(mode, "twice") == 0) ask(args, "Y", EDGE_INT32, 1, x->dims, x->byte_size);
  return 0;
}

#if RULE != NO_RUN
int32_t edge_model_run(edge_model* model, const edge_run_args* args, edge_text* error) {
  return run(model, args, error);
}
#else
int32_t (*unused)(edge_model*, const edge_run_args*, edge_text*) = run;
#endif

void edge_model_close(edge_model* model) { free(model); }
