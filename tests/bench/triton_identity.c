/* Backend for NVIDIA's Triton that returns each input as the output of its number: what the server itself costs.
 *
 * INPUT0 is returned as OUTPUT0, of the same shape. Of a model whose name begins with "frame" only the first three
 * bytes are returned. Build it with the headers of the public repository triton-inference-server/core, into a folder
 * of its name below the one that `triton_rounds.py --backends` names:
 *
 *     gcc -O2 -shared -fPIC -I CORE/include -o BACKENDS/identity/libtriton_identity.so tests/bench/triton_identity.c
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* The headers are written for C++, where a struct's tag is a type's name. */
#define TYPE(name) typedef struct name name
TYPE(TRITONSERVER_BufferAttributes);
TYPE(TRITONSERVER_Error);
TYPE(TRITONSERVER_InferenceRequest);
TYPE(TRITONSERVER_InferenceResponse);
TYPE(TRITONSERVER_InferenceTrace);
TYPE(TRITONSERVER_Message);
TYPE(TRITONSERVER_Metric);
TYPE(TRITONSERVER_MetricFamily);
TYPE(TRITONSERVER_Metrics);
TYPE(TRITONSERVER_MetricArgs);
TYPE(TRITONSERVER_Parameter);
TYPE(TRITONSERVER_ResponseAllocator);
TYPE(TRITONSERVER_Server);
TYPE(TRITONSERVER_ServerOptions);
TYPE(TRITONBACKEND_Backend);
TYPE(TRITONBACKEND_BackendAttribute);
TYPE(TRITONBACKEND_Batcher);
TYPE(TRITONBACKEND_Input);
TYPE(TRITONBACKEND_MemoryManager);
TYPE(TRITONBACKEND_Model);
TYPE(TRITONBACKEND_ModelInstance);
TYPE(TRITONBACKEND_ModelInstanceResponseStatistics);
TYPE(TRITONBACKEND_Output);
TYPE(TRITONBACKEND_Request);
TYPE(TRITONBACKEND_Response);
TYPE(TRITONBACKEND_ResponseFactory);
TYPE(TRITONBACKEND_State);
#include "triton/core/tritonbackend.h"

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static void drop(TRITONSERVER_Error* error) {
  if (error != NULL) TRITONSERVER_ErrorDelete(error);
}

/* The state of an instance is whether its model returns three bytes. */
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
  TRITONBACKEND_Model* model;
  const char* name;
  TRITONSERVER_Error* error = TRITONBACKEND_ModelInstanceModel(instance, &model);
  if (error == NULL) error = TRITONBACKEND_ModelName(model, &name);
  if (error != NULL) return error;
  return TRITONBACKEND_ModelInstanceSetState(instance, strncmp(name, "frame", 5) == 0 ? (void*)1 : NULL);
}

static TRITONSERVER_Error* copy_input(
    TRITONBACKEND_Request* request, uint32_t index, TRITONBACKEND_Response* response, bool is_frame) {
  const int64_t three = 3;
  TRITONBACKEND_Input* input;
  TRITONBACKEND_Output* output;
  const char* name;
  char output_name[128];
  TRITONSERVER_DataType type;
  const int64_t* shape;
  uint32_t rank, buffers;
  uint64_t size, done = 0;
  void* target;
  TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
  int64_t memory_id = 0;
  TRITONSERVER_Error* error = TRITONBACKEND_RequestInputByIndex(request, index, &input);
  if (error != NULL) return error;
  error = TRITONBACKEND_InputProperties(input, &name, &type, &shape, &rank, &size, &buffers);
  if (error != NULL) return error;
  snprintf(output_name, sizeof output_name, "OUTPUT%s", strncmp(name, "INPUT", 5) == 0 ? name + 5 : name);
  if (is_frame) {
    shape = &three;
    rank = 1;
    size = 3;
  }
  error = TRITONBACKEND_ResponseOutput(response, &output, output_name, type, shape, rank);
  if (error != NULL) return error;
  error = TRITONBACKEND_OutputBuffer(output, &target, size, &memory, &memory_id);
  for (uint32_t at = 0; error == NULL && at < buffers && done < size; at++) {
    const void* source;
    uint64_t part;
    error = TRITONBACKEND_InputBuffer(input, at, &source, &part, &memory, &memory_id);
    if (error == NULL) {
      if (part > size - done) part = size - done;
      memcpy((char*)target + done, source, part);
      done += part;
    }
  }
  return error;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  void* is_frame = NULL;
  drop(TRITONBACKEND_ModelInstanceState(instance, &is_frame));
  const uint64_t batch_started = now_ns();
  for (uint32_t at = 0; at < count; at++) {
    const uint64_t started = now_ns();
    uint32_t inputs = 0;
    TRITONBACKEND_Response* response = NULL;
    TRITONSERVER_Error* error = TRITONBACKEND_ResponseNew(&response, requests[at]);
    if (error == NULL) error = TRITONBACKEND_RequestInputCount(requests[at], &inputs);
    for (uint32_t index = 0; error == NULL && index < inputs; index++)
      error = copy_input(requests[at], index, response, is_frame != NULL);
    const bool succeeded = error == NULL;
    if (response != NULL)
      drop(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error));
    drop(error);
    const uint64_t ended = now_ns();
    drop(TRITONBACKEND_ModelInstanceReportStatistics(
        instance, requests[at], succeeded, started, started, ended, ended));
    drop(TRITONBACKEND_RequestRelease(requests[at], TRITONSERVER_REQUEST_RELEASE_ALL));
  }
  const uint64_t batch_ended = now_ns();
  drop(TRITONBACKEND_ModelInstanceReportBatchStatistics(
      instance, count, batch_started, batch_started, batch_ended, batch_ended));
  return NULL;
}
