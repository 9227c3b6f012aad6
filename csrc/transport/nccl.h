// NCCL without torch between: enqueues the engine's collectives on the communicators of torch's process groups. torch
// makes a Work, an event and a record for each collective, which takes the host several times as long as NCCL takes.
// torch's watchdog does not see what is enqueued here.
//
// All functions are looked up at run time, so that the extension builds and loads without CUDA.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace fusedcomm {

// What a library has of a symbol's name.
struct Symbol {
  void* function = nullptr;   // the library's; null if there is none
  std::string other_library;  // whose function torch calls in its place; empty if there is none

  // Null if torch calls another one.
  void* of_torch() const { return other_library.empty() ? function : nullptr; }
};
using FindSymbol = std::function<Symbol(const char* symbol)>;

// Finds symbols in a library that this process has loaded, and in those that it depends on; null if it is not loaded.
// library: a file name or path for dlopen.
FindSymbol symbols_of(const std::string& library);

class Nccl;

// A communicator, and the stream on which its collectives are enqueued. Its functions return when NCCL has enqueued.
// They throw std::runtime_error, whose text has NCCL's function, its result and what NCCL says about it.
class NcclCommunicator {
 public:
  NcclCommunicator(const Nccl& nccl, void* handle, void* stream) : nccl_(nccl), handle_(handle), stream_(stream) {}

  // See Transport; a part of part_nbytes for each rank.
  void all_to_all(const std::byte* send, std::byte* receive, int64_t part_nbytes) const;
  // nbytes: of one rank's message.
  void all_gather(const std::byte* send, std::byte* receive, int64_t nbytes) const;
  // In place. dtype: kFloat, kBFloat16 or kHalf.
  void all_reduce(std::byte* data, int64_t nbytes, at::ScalarType dtype) const;

 private:
  // Throws unless NCCL has enqueued.
  void check(int result, const char* function) const;

  const Nccl& nccl_;
  void* const handle_;
  void* const stream_;
};

// NCCL's functions, and torch's that know its communicators.
class Nccl {
 public:
  // The library of torch's that has its NCCL backends, and has or needs the NCCL that they call.
  static constexpr const char* kLibrary = "libtorch_cuda.so";

  // library: its name in texts. find: null if it is not loaded. through_torch: why NCCL must not be called directly;
  // empty if it may be. Throws nothing: why_not() tells what is missing.
  Nccl(const std::string& library, const FindSymbol& find, const std::string& through_torch = "");

  // Why the backend's collectives must go through torch, on the current device; empty if they need not.
  std::string why_not(c10d::Backend& backend) const;
  // The backend's communicator on the current device; none if its collectives must go through torch, as those do that
  // make torch connect the ranks. Asked for each collective, since torch or its user may end it at any time.
  std::optional<NcclCommunicator> communicator(c10d::Backend& backend, c10::Device device) const;
  // Lets this thread wait for streams and end communicators while another thread captures a CUDA graph, which it would
  // spoil otherwise. Call it on a thread of our own.
  void relax_capture_mode() const;

 private:
  friend class NcclCommunicator;
  using GetCommunicator = int64_t (*)(void* backend);
  template <typename Function>
  void find(const FindSymbol& symbols, const char* symbol, Function* function);
  // Null if the backend's class is none of NCCL's, or the library lacks the function.
  GetCommunicator getter_of(const c10d::Backend& backend) const;
  // Null without a getter, and if torch has not connected the ranks. Throws c10::Error if it has aborted them.
  void* handle_of(c10d::Backend& backend) const;

  const std::string library_;
  std::string missing_;                          // why nothing can be called; empty if all functions are there
  std::array<GetCommunicator, 2> getters_ = {};  // by class of torch's backends

  // Types as in nccl.h, with handles as void* and enumerations as int.
  using Result = int;
  const char* (*get_error_string_)(Result);
  const char* (*get_last_error_)(void* communicator);
  Result (*all_to_all_)(const void* send, void* receive, size_t count, int dtype, void* communicator, void* stream);
  Result (*all_gather_)(const void* send, void* receive, size_t count, int dtype, void* communicator, void* stream);
  Result (*all_reduce_)(const void* send, void* receive, size_t count, int dtype, int operation, void* communicator,
                        void* stream);
  // Of CUDA's runtime; null if the library needs none.
  Result (*exchange_capture_mode_)(int* mode) = nullptr;
};

}  // namespace fusedcomm
