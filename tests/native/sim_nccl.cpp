// The stand-in for NCCL of sim_backend.h: functions with NCCL's symbols, whose communicators are backends.
#include <dlfcn.h>

#include <exception>
#include <mutex>
#include <utility>

#include "require.h"
#include "sim_accelerator.h"
#include "sim_backend.h"
#include "transport/wire_tensor.h"

namespace {

constexpr int kSuccess = 0, kUnhandledCudaError = 1;

std::mutex mutex;                                         // protects what follows
std::map<int, std::map<std::string, int64_t>> num_calls;  // by device and function
std::string failing;
int failing_result = kSuccess;

thread_local std::string t_last_error;

// Counts a call and returns its result.
int begin(const char* function, const sim::Backend* communicator) {
  std::lock_guard<std::mutex> lock(mutex);
  ++num_calls[sim::device_of(*communicator).index()][function];
  if (failing != function) return kSuccess;
  t_last_error = "the test made this call fail";
  return failing_result;
}

// sent, received: elements.
int enqueue(int result, sim::Collective what, const void* send, size_t sent, void* receive, size_t received, int dtype,
            sim::Backend* communicator, void* stream) {
  if (result != kSuccess) return result;
  const std::map<int, at::ScalarType> types = {{1, at::kByte}, {6, at::kHalf}, {7, at::kFloat}, {9, at::kBFloat16}};
  const at::ScalarType type = types.at(dtype);
  const auto tensor = [&](const void* data, size_t count) {
    auto* const bytes = static_cast<std::byte*>(const_cast<void*>(data));
    const auto nbytes = static_cast<int64_t>(count * c10::elementSize(type));
    return fusedcomm::as_tensor({bytes, nbytes, nullptr}, type, sim::device_of(*communicator));
  };
  try {
    sim::enqueue(*communicator, what, tensor(send, sent), tensor(receive, received), sim::stream_of(stream));
  } catch (const std::exception& error) {
    t_last_error = error.what();
    return kUnhandledCudaError;
  }
  return result;
}

size_t of_all(size_t count, const sim::Backend* communicator) {
  return count * static_cast<size_t>(sim::size_of(*communicator));
}

}  // namespace

#define NCCL extern "C" __attribute__((visibility("default")))

NCCL const char* ncclGetErrorString(int result) { return result == 3 ? "internal error" : "an error"; }
NCCL const char* ncclGetLastError(void*) { return t_last_error.c_str(); }
NCCL int ncclAlltoAll(const void* send, void* receive, size_t count, int dtype, sim::Backend* communicator,
                      void* stream) {
  const size_t all = of_all(count, communicator);
  return enqueue(begin("ncclAlltoAll", communicator), sim::Collective::kAllToAll, send, all, receive, all, dtype,
                 communicator, stream);
}
NCCL int ncclAllGather(const void* send, void* receive, size_t count, int dtype, sim::Backend* communicator,
                       void* stream) {
  return enqueue(begin("ncclAllGather", communicator), sim::Collective::kAllGather, send, count, receive,
                 of_all(count, communicator), dtype, communicator, stream);
}
NCCL int ncclAllReduce(const void* send, void* receive, size_t count, int dtype, int operation,
                       sim::Backend* communicator, void* stream) {
  REQUIRE(operation == 0, "the reduction %d is no sum", operation);
  return enqueue(begin("ncclAllReduce", communicator), sim::Collective::kAllReduce, send, count, receive, count, dtype,
                 communicator, stream);
}

// CUDA's runtime hands it to the driver.
extern "C" int cuThreadExchangeStreamCaptureMode(int* mode);
NCCL int cudaThreadExchangeStreamCaptureMode(int* mode) { return cuThreadExchangeStreamCaptureMode(mode); }

namespace sim {

std::shared_ptr<const fusedcomm::Nccl> nccl(const std::string& hidden, const std::string& through_torch) {
  const auto find = [hidden](const char* symbol) -> fusedcomm::Symbol {
    // As if another package had loaded a runtime of its own.
    const char* const other_library = std::string(symbol).starts_with("cuda") ? "another runtime" : "";
    return {hidden == symbol ? nullptr : dlsym(RTLD_DEFAULT, symbol), other_library};
  };
  return std::make_shared<fusedcomm::Nccl>("the simulated NCCL", find, through_torch);
}

std::string take_nccl_calls(int index) {
  std::lock_guard<std::mutex> lock(mutex);
  std::string text;
  for (const auto& [function, num] : std::exchange(num_calls[index], {}))
    text += function + " " + std::to_string(num) + " ";
  return text;
}

void fail_nccl(const std::string& function, int result) {
  std::lock_guard<std::mutex> lock(mutex);
  failing = function;
  failing_result = result;
}

}  // namespace sim
