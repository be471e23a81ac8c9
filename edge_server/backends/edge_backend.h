/* The C interface by which a shared library serves as a model: backend "c_abi" of edge_server.
 *
 * A model folder holds 1/libmodel.so, and a config.pbtxt that may be empty where the library describes its tensors.
 * The library exports, with C linkage:
 *
 *   edge_backend_abi_version   required
 *   edge_model_open            required
 *   edge_model_describe        optional; without it config.pbtxt states all inputs and outputs
 *   edge_model_run             required
 *   edge_model_close           required
 *
 * It runs inside the server's process: a crash in it ends the server. Nothing may be thrown across these functions.
 *
 * Threads. Each instance of a model is a handle of its own. One handle is used by one thread at a time, not always the
 * same one; several handles run at the same time. After the last edge_model_close the library may be unloaded: no thread
 * of its own may be left by then.
 *
 * The file is copied before it is loaded, so that it may be overwritten while it serves. $ORIGIN in its run path is
 * therefore not its own folder; other libraries must be found elsewhere, or opened by `version_dir`.
 *
 * Memory. What the server hands over is valid until the function returns, and is not to be written to, except for what
 * `allocate` returned and the text buffers. What the library hands over (the description) stays valid until
 * edge_model_close.
 */
#ifndef EDGE_BACKEND_H
#define EDGE_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Returned by edge_backend_abi_version. Raised with every change that is not an addition at the end of a struct, where
 * `struct_size` tells which members are there. */
#define EDGE_BACKEND_ABI_VERSION 1u

/* Element types, numbered as inference.DataType is in Triton's model_config.proto. */
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
  EDGE_BYTES = 13, /* each element behind its length, 4 bytes, little-endian */
  EDGE_BF16 = 14
} edge_datatype;

/* One handle, the library's own. */
typedef struct edge_model edge_model;

/* Where a function that fails says why: UTF-8, ended by a zero, at most `capacity` bytes with it. */
typedef struct edge_text {
  char* data;
  size_t capacity;
} edge_text;

typedef struct edge_open_args {
  uint32_t struct_size;
  const char* model_name;
  int64_t version;
  const char* version_dir;   /* the folder that holds the library's file */
  const char* instance_name; /* "" when the model is opened only to be described */
  int32_t device_id;         /* number of a GPU, -1 for the CPU */
  uint32_t parameter_count;  /* `parameters` of config.pbtxt, and --backend-config=c_abi,key=value */
  const char* const* parameter_keys;
  const char* const* parameter_values;
} edge_open_args;

/* A tensor as the model declares it. `dims` are complete, -1 for any size; where the first one is -1 in every tensor,
 * requests may be joined there to batches. */
typedef struct edge_tensor_spec {
  const char* name;
  int32_t datatype;
  int32_t rank;
  const int64_t* dims;
} edge_tensor_spec;

/* A tensor with its elements, dense, the last dimension fastest, aligned to its element's size. */
typedef struct edge_tensor {
  const char* name;
  int32_t datatype;
  int32_t rank;
  const int64_t* dims;
  const void* data; /* NULL only where byte_size is 0 */
  uint64_t byte_size;
} edge_tensor;

/* What an edge_model_run is given, and how it answers. */
typedef struct edge_run_args {
  uint32_t struct_size;
  uint32_t input_count;
  const edge_tensor* inputs; /* optional inputs that a request left out are left out here */
  uint32_t output_count;
  const char* const* output_names; /* the outputs that are asked for */
  /* Returns zeroed memory of `byte_size` bytes for an output to be written into before edge_model_run returns. Once for
   * each output, in any order, on the thread of edge_model_run. NULL where the name is not asked for, was had before, or
   * type, dims and byte_size do not go together; the run then fails, whatever it returns. */
  void* (*allocate)(void* context, const char* name, int32_t datatype, int32_t rank, const int64_t* dims,
                    uint64_t byte_size);
  void* context;
} edge_run_args;

/* Functions that return int32_t return 0 when all is well. */

uint32_t edge_backend_abi_version(void);

/* Opens one instance. Sets *model when it returns 0, and only then. */
int32_t edge_model_open(const edge_open_args* args, edge_model** model, edge_text* error);

/* Tells the model's inputs and outputs. */
int32_t edge_model_describe(edge_model* model, const edge_tensor_spec** inputs, uint32_t* input_count,
                            const edge_tensor_spec** outputs, uint32_t* output_count, edge_text* error);

/* Runs one batch. */
int32_t edge_model_run(edge_model* model, const edge_run_args* args, edge_text* error);

/* Closes an instance. Called once for each open that succeeded. */
void edge_model_close(edge_model* model);

#ifdef __cplusplus
}
#endif

#endif
