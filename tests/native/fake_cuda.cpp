// A fake CUDA driver for tests. Modules are names and functions are numbers. A launch calls back into the test, which
// gets exactly what the engine passed and may run the kernel in host memory.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace {

using Result = int;
// The test's callback. `function`: the number of a function; `params`: the argument of cuLaunchKernel.
using Launch = Result (*)(int64_t function, unsigned num_programs, unsigned num_threads, unsigned shared_nbytes,
                          void* stream, void** params);

Launch on_launch = nullptr;
std::vector<std::string> functions;  // "image:symbol", by number − 1
std::string failing_call;
Result failing_result = 0;
std::atomic<int> capture_status{0};
thread_local int capture_mode = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL, until the thread exchanges it
int64_t num_loads = 0;
int64_t context = 1;

Result result_of(const char* call) { return failing_call == call ? failing_result : 0; }

}  // namespace

extern "C" {

// ---- for the test

void fake_on_launch(Launch callback) { on_launch = callback; }

// Makes every later call of `call` return `result`. An empty name ends this.
void fake_fail(const char* call, Result result) {
  failing_call = call;
  failing_result = result;
}

// Sets what cuStreamIsCapturing reports for every stream: 0 for not captured, 1 for captured.
void fake_capture(int status) { capture_status = status; }

// Whether what this thread asks a stream, or waits for, would spoil the capture.
int fake_spoils_capture() { return capture_status != 0 && capture_mode != 2; }
// Whether a question for all streams of a device would, on any thread.
int fake_is_captured() { return capture_status != 0; }

// The number of modules loaded so far.
int64_t fake_num_loads() { return num_loads; }
// Sets the current context.
void fake_set_context(int64_t number) { context = number; }

const char* fake_function_name(int64_t function) { return functions[static_cast<size_t>(function) - 1].c_str(); }

// ---- the driver

Result cuInit(unsigned) { return result_of("cuInit"); }

Result cuGetErrorName(Result result, const char** name) {
  *name = result == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OF_THE_TEST";
  return 0;
}

Result cuGetErrorString(Result, const char** text) {
  *text = "the test made this call fail";
  return 0;
}

Result cuCtxGetCurrent(void** current) {
  *current = reinterpret_cast<void*>(context);
  return result_of("cuCtxGetCurrent");
}

Result cuModuleLoadData(void** module, const void* image) {
  ++num_loads;
  *module = new std::string(static_cast<const char*>(image));  // never freed: the engine unloads no module
  return result_of("cuModuleLoadData");
}

Result cuModuleGetFunction(void** function, void* module, const char* name) {
  functions.push_back(*static_cast<std::string*>(module) + ":" + name);
  *function = reinterpret_cast<void*>(functions.size());
  return result_of("cuModuleGetFunction");
}

Result cuFuncSetAttribute(void*, int, int) { return result_of("cuFuncSetAttribute"); }

Result cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared_nbytes, void* stream, void** params,
                      void** extra) {
  if (const Result result = result_of("cuLaunchKernel")) return result;
  if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || extra) return 1;
  return on_launch ? on_launch(reinterpret_cast<int64_t>(function), grid_x, block_x, shared_nbytes, stream, params) : 0;
}

Result cuStreamIsCapturing(void*, int* status) {
  *status = capture_status;
  return result_of("cuStreamIsCapturing");
}

Result cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return result_of("cuThreadExchangeStreamCaptureMode");
}

}  // extern "C"
