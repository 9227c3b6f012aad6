#include "devices/cuda_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>

namespace fusedcomm {
namespace {

// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
constexpr int kMaxDynamicSharedNbytes = 8;
// CUDA_ERROR_ILLEGAL_ADDRESS, _LAUNCH_TIMEOUT, _ASSERT and similar ones: a kernel has failed, and every later call
// reports it.
constexpr int kFaults[] = {700, 702, 710, 714, 715, 716, 717, 718, 719};
// CUDA_ERROR_INVALID_IMAGE, _NO_BINARY_FOR_GPU, _INVALID_PTX, _UNSUPPORTED_PTX_VERSION.
constexpr int kUnknownImages[] = {200, 209, 218, 222};
// CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: the default stream was used while another stream is captured.
constexpr int kCaptureImplicit = 906;
// CU_STREAM_CAPTURE_MODE_RELAXED.
constexpr int kCaptureModeRelaxed = 2;
// Bytes of shared memory that a kernel may use without setting an attribute.
constexpr uint32_t kDefaultMaxSharedNbytes = 48 << 10;

// What to do about an error, after its text; may be empty.
const char* advice(int result) {
  const auto is_one_of = [result](const auto& results) {
    return std::find(std::begin(results), std::end(results), result) != std::end(results);
  };
  if (is_one_of(kUnknownImages))
    return ". The NVIDIA driver may be older than the CUDA of Triton's compiler: update it";
  if (!is_one_of(kFaults)) return "";
  return "\nThe cause may be a kernel launched earlier, fusedcomm's or the model's: FUSEDCOMM_SYNC=1 finds the stage "
         "of "
         "fusedcomm's, CUDA_LAUNCH_BLOCKING=1 finds the model's kernel";
}

template <typename Function>
void find(void* library, const std::string& name, const char* symbol, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (!*function) {
    throw std::runtime_error("fusedcomm: " + name + " has no " + symbol +
                             ": fusedcomm cannot use it as a CUDA driver; update the NVIDIA driver");
  }
}

// Library, context, cubin and symbol. The key has the whole cubin, some ten KiB, so that no two cubins are confused.
using LoadedKey = std::tuple<void*, void*, std::string, std::string>;
std::mutex loaded_mutex;
std::map<LoadedKey, void*>& loaded() {
  static auto* functions = new std::map<LoadedKey, void*>();  // never destroyed, like the modules
  return *functions;
}

}  // namespace

CudaDriver::CudaDriver(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: kernels stay loaded, too
  if (!handle) {
    const char* error = dlerror();
    throw std::runtime_error("fusedcomm: no CUDA driver: " + std::string(error ? error : library) +
                             ". Gradients on cuda need an NVIDIA driver on this machine");
  }
  find(handle, library, "cuInit", &init_);
  find(handle, library, "cuGetErrorName", &get_error_name_);
  find(handle, library, "cuGetErrorString", &get_error_string_);
  find(handle, library, "cuCtxGetCurrent", &ctx_get_current_);
  find(handle, library, "cuModuleLoadData", &module_load_data_);
  find(handle, library, "cuModuleGetFunction", &module_get_function_);
  find(handle, library, "cuFuncSetAttribute", &func_set_attribute_);
  find(handle, library, "cuLaunchKernel", &launch_kernel_);
  find(handle, library, "cuStreamIsCapturing", &stream_is_capturing_);
  find(handle, library, "cuThreadExchangeStreamCaptureMode", &thread_exchange_stream_capture_mode_);
  library_ = handle;
  check(init_(0), "cuInit");
}

void CudaDriver::check(Result result, const char* call) const {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  get_error_name_(result, &name);
  get_error_string_(result, &text);
  throw std::runtime_error(std::string(call) + " failed with " + (name ? name : "an unknown error") + " (" +
                           std::to_string(result) + "): " + (text ? text : "no description") + advice(result));
}

void* CudaDriver::load(const std::string& cubin, const std::string& symbol, uint32_t shared_nbytes) const {
  void* context = nullptr;
  check(ctx_get_current_(&context), "cuCtxGetCurrent");
  std::lock_guard<std::mutex> lock(loaded_mutex);
  void*& function = loaded()[{library_, context, cubin, symbol}];
  if (!function) function = load_anew(cubin, symbol, shared_nbytes);
  return function;
}

void* CudaDriver::load_anew(const std::string& cubin, const std::string& symbol, uint32_t shared_nbytes) const {
  void *module = nullptr, *function = nullptr;
  check(module_load_data_(&module, cubin.data()), "cuModuleLoadData");
  check(module_get_function_(&function, module, symbol.c_str()), "cuModuleGetFunction");
  if (shared_nbytes > kDefaultMaxSharedNbytes) {
    check(func_set_attribute_(function, kMaxDynamicSharedNbytes, static_cast<int>(shared_nbytes)),
          "cuFuncSetAttribute");
  }
  return function;
}

void CudaDriver::launch(void* function, uint32_t num_programs, uint32_t num_threads, uint32_t shared_nbytes,
                        void* stream, void** params) const {
  check(launch_kernel_(function, num_programs, 1, 1, num_threads, 1, 1, shared_nbytes, stream, params, nullptr),
        "cuLaunchKernel");
}

bool CudaDriver::is_capturing(void* stream) const {
  int status = 0;
  const Result result = stream_is_capturing_(stream, &status);
  // Any other error is of earlier work: the next call reports it, with the bucket's name.
  return result == kCaptureImplicit || (result == 0 && status != 0);
}

void CudaDriver::relax_capture_mode() const {
  int mode = kCaptureModeRelaxed;
  check(thread_exchange_stream_capture_mode_(&mode), "cuThreadExchangeStreamCaptureMode");
}

}  // namespace fusedcomm
