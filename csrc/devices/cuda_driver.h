// The few calls of the CUDA driver that a kernel launch needs. They are looked up at run time, so that the extension
// builds and loads without CUDA.
#pragma once

#include <cstdint>
#include <string>

namespace fusedcomm {

class CudaDriver {
 public:
  // library: a file name or path for dlopen, "libcuda.so.1" on a machine with a driver. Throws std::runtime_error,
  // whose text says what was not found.
  explicit CudaDriver(const std::string& library);

  // The function `symbol` of `cubin` in the current context. It is loaded once, for the life of the process: a later
  // call, e.g. when attaching again, returns the same function.
  void* load(const std::string& cubin, const std::string& symbol, uint32_t shared_nbytes) const;

  // Launches a one-dimensional grid. `params` points to each parameter's value, in the order of the kernel's signature.
  void launch(void* function, uint32_t num_programs, uint32_t num_threads, uint32_t shared_nbytes, void* stream,
              void** params) const;

  // Whether `stream` is being captured into a CUDA graph.
  bool is_capturing(void* stream) const;

  // Makes sure that later calls of this thread do not disturb other threads' captures.
  void relax_capture_mode() const;

 private:
  using Result = int;  // CUresult
  void check(Result result, const char* call) const;
  void* load_anew(const std::string& cubin, const std::string& symbol, uint32_t shared_nbytes) const;

  void* library_;

  // Types as in cuda.h, with handles as void*.
  Result (*init_)(unsigned flags);
  Result (*get_error_name_)(Result, const char**);
  Result (*get_error_string_)(Result, const char**);
  Result (*ctx_get_current_)(void** context);
  Result (*module_load_data_)(void** module, const void* image);
  Result (*module_get_function_)(void** function, void* module, const char* name);
  Result (*func_set_attribute_)(void* function, int attribute, int value);
  Result (*launch_kernel_)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                           unsigned block_y, unsigned block_z, unsigned shared_nbytes, void* stream, void** params,
                           void** extra);
  Result (*stream_is_capturing_)(void* stream, int* status);
  Result (*thread_exchange_stream_capture_mode_)(int* mode);
};

}  // namespace fusedcomm
