/* C interface for models that are shared libraries: backend "c_abi" of edge_server.
 *
 * A model folder contains 1/libmodel.so and a config.pbtxt. The config.pbtxt may be empty if the library describes its
 * tensors. The library exports these functions with C linkage:
 *
 *   edge_backend_abi_version   required
 *   edge_model_open            required
 *   edge_model_describe        optional; without it config.pbtxt declares all inputs and outputs
 *   edge_model_run             required
 *   edge_model_close           required
 *
 * The library runs in the server's process: a crash of the library ends the server. No exception may leave these
 * functions.
 *
 * Order of calls. For each instance of the model: edge_model_open, edge_model_describe (0 or more times),
 * edge_model_run (0 or more times), edge_model_close. The server may also open, describe and close an instance only to
 * read the model's tensors.
 *
 * Threads. Each instance has its own handle. The server calls the functions of one handle from one thread at a time,
 * but not always from the same thread. It calls functions of different handles at the same time. The server may unload
 * the library after the last edge_model_close. All threads that the library started must have ended by then.
 *
 * Memory. Memory that the server passes is valid until the function returns. The library may write only to memory that
 * `allocate` returned and to the text buffers. The description that the library returns must stay valid until
 * edge_model_close.
 *
 * File. The server copies the file before it loads it, so the file may be overwritten while the model serves. $ORIGIN
 * in the run path is therefore not the library's own folder. Install other libraries where the loader finds them, or
 * open them by their path in `version_dir`.
 */
#ifndef EDGE_BACKEND_H
#define EDGE_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The value that edge_backend_abi_version must return. It increases with every incompatible change. A new member at the
 * end of a struct is a compatible change: `struct_size` tells which members are present. */
#define EDGE_BACKEND_ABI_VERSION 1u

/* Element types, with the numbers of inference.DataType in Triton's model_config.proto. */
typedef enum edge_datatype {
  EDGE_BOOL = 1,
  EDGE_UINT8 = 2,
  EDGE_UINT16 = 3,
  EDGE_UINT32 = 4,
  EDGE_UINT64 = 5,
  EDGE_INT8 = 6,
  EDGE_INT16 = 7,
  EDGE_INT32 = 8,
  EDGE_INT64 = 9,
  EDGE_FP16 = 10,
  EDGE_FP32 = 11,
  EDGE_FP64 = 12,
  EDGE_BYTES = 13, /* each element follows its length, 4 bytes, little-endian */
  EDGE_BF16 = 14
} edge_datatype;

/* Handle of one instance. The library defines the struct. */
typedef struct edge_model edge_model;

/* Buffer for the reason of a failure: UTF-8, zero-terminated, at most `capacity` bytes including the zero. */
typedef struct edge_text {
  char* data;
  size_t capacity;
} edge_text;

/* Arguments of edge_model_open. */
typedef struct edge_open_args {
  uint32_t struct_size;
  const char* model_name;
  int64_t version;
  const char* version_dir;   /* the folder of the library's file */
  const char* instance_name; /* "" if the model is opened only to be described */
  int32_t device_id;         /* number of a GPU, -1 for the CPU */
  uint32_t parameter_count;  /* `parameters` of config.pbtxt, and --backend-config=c_abi,key=value */
  const char* const* parameter_keys;
  const char* const* parameter_values;
} edge_open_args;

/* A tensor as the model declares it. `dims` are all dimensions, -1 for any size. If the first one is -1 in every tensor,
 * the server may join requests to batches along it. */
typedef struct edge_tensor_spec {
  const char* name;
  int32_t datatype;
  int32_t rank;
  const int64_t* dims;
} edge_tensor_spec;

/* A tensor with its elements: dense, in C order, aligned to the size of an element. */
typedef struct edge_tensor {
  const char* name;
  int32_t datatype;
  int32_t rank;
  const int64_t* dims;
  const void* data; /* NULL only if byte_size is 0 */
  uint64_t byte_size;
} edge_tensor;

/* Arguments of edge_model_run, and the function that provides memory for its outputs. */
typedef struct edge_run_args {
  uint32_t struct_size;
  uint32_t input_count;
  const edge_tensor* inputs; /* without optional inputs that the request does not have */
  uint32_t output_count;
  const char* const* output_names; /* the requested outputs */
  /* Returns `byte_size` bytes of zeroed memory for one output. The library writes the output there before edge_model_run
   * returns. Call it once for each requested output, in any order, on the thread of edge_model_run, and pass `context`
   * as its first argument. It returns NULL if the output is not requested or was allocated before, if type, dims and
   * byte_size do not match, or without memory. The run then fails, whatever edge_model_run returns. */
  void* (*allocate)(void* context, const char* name, int32_t datatype, int32_t rank, const int64_t* dims,
                    uint64_t byte_size);
  void* context;
} edge_run_args;

/* Functions that return int32_t return 0 for success. For any other value they write the reason to `error`. */

/* Returns EDGE_BACKEND_ABI_VERSION of the header that the library was compiled with. */
uint32_t edge_backend_abi_version(void);

/* Opens one instance. Sets *model if and only if it returns 0. */
int32_t edge_model_open(const edge_open_args* args, edge_model** model, edge_text* error);

/* Returns the model's inputs and outputs. */
int32_t edge_model_describe(edge_model* model, const edge_tensor_spec** inputs, uint32_t* input_count,
                            const edge_tensor_spec** outputs, uint32_t* output_count, edge_text* error);

/* Runs one batch. It must allocate and write every requested output. */
int32_t edge_model_run(edge_model* model, const edge_run_args* args, edge_text* error);

/* Closes an instance. Called once for each successful edge_model_open, after its last run. */
void edge_model_close(edge_model* model);

#ifdef __cplusplus
}
#endif

#endif
