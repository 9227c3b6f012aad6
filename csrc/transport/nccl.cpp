#include "transport/nccl.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <dlfcn.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <typeinfo>

#include "transport/error_text.h"

namespace fusedcomm {
namespace {

// ncclResult_t.
constexpr int kNcclSuccess = 0, kNcclInProgress = 7;
// ncclDataType_t.
constexpr int kNcclUint8 = 1, kNcclFloat16 = 6, kNcclFloat32 = 7, kNcclBfloat16 = 9;
// ncclRedOp_t.
constexpr int kNcclSum = 0;
// cudaStreamCaptureModeRelaxed.
constexpr int kCaptureModeRelaxed = 2;

// torch's backends for NCCL: the class as typeid names it, and its function that returns the current device's
// communicator.
struct NcclClass {
  const char* name;
  const char* get_communicator;
};
constexpr std::array<NcclClass, 2> kNcclClasses = {{
    {"N4c10d16ProcessGroupNCCLE", "_ZN4c10d16ProcessGroupNCCL10getCommPtrEv"},
    {"N4c10d5nccl216ProcessGroupNCCLE", "_ZNK4c10d5nccl216ProcessGroupNCCL10getCommPtrEv"},
}};

// The index of the backend's class in kNcclClasses; its size for another class.
size_t nccl_class_of(const c10d::Backend& backend) {
  const char* const name = typeid(backend).name();
  size_t i = 0;
  while (i < kNcclClasses.size() && std::strcmp(name, kNcclClasses[i].name) != 0) ++i;
  return i;
}

}  // namespace

FindSymbol symbols_of(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);  // never closed, as torch never closes it
  if (!handle) return nullptr;
  return [handle](const char* symbol) -> Symbol {
    void* const found = dlsym(handle, symbol);
    // A library that was loaded before for all, which torch calls then. Communicators are of that one.
    void* const of_all = dlsym(RTLD_DEFAULT, symbol);
    if (!of_all || of_all == found) return {found, ""};
    Dl_info other{};
    return {found, dladdr(of_all, &other) && other.dli_fname ? other.dli_fname : "another library"};
  };
}

Nccl::Nccl(const std::string& library, const FindSymbol& symbols, const std::string& through_torch)
    : library_(library), missing_(through_torch) {
  if (!symbols) {
    if (missing_.empty()) missing_ = library + " is not loaded";
    return;
  }
  for (size_t i = 0; i < getters_.size(); ++i) {
    getters_[i] = reinterpret_cast<GetCommunicator>(symbols(kNcclClasses[i].get_communicator).of_torch());
  }
  find(symbols, "ncclGetErrorString", &get_error_string_);
  find(symbols, "ncclGetLastError", &get_last_error_);
  find(symbols, "ncclAlltoAll", &all_to_all_);  // since NCCL 2.28, which torch 2.11 brings
  find(symbols, "ncclAllGather", &all_gather_);
  find(symbols, "ncclAllReduce", &all_reduce_);
  // Of any runtime: all of them hand it to the one driver.
  const char* const exchange = "cudaThreadExchangeStreamCaptureMode";
  exchange_capture_mode_ = reinterpret_cast<decltype(exchange_capture_mode_)>(symbols(exchange).function);
}

template <typename Function>
void Nccl::find(const FindSymbol& symbols, const char* symbol, Function* function) {
  const Symbol found = symbols(symbol);
  *function = reinterpret_cast<Function>(found.of_torch());
  if (*function || !missing_.empty()) return;
  missing_ = found.other_library.empty()
                 ? library_ + " has no " + symbol
                 : "torch calls the " + std::string(symbol) + " of " + found.other_library + ", not of " + library_;
}

Nccl::GetCommunicator Nccl::getter_of(const c10d::Backend& backend) const {
  const size_t of_class = nccl_class_of(backend);
  return of_class < getters_.size() ? getters_[of_class] : nullptr;
}

void* Nccl::handle_of(c10d::Backend& backend) const {
  const GetCommunicator get = getter_of(backend);
  return get ? reinterpret_cast<void*>(get(dynamic_cast<void*>(&backend))) : nullptr;
}

std::string Nccl::why_not(c10d::Backend& backend) const {
  if (!missing_.empty()) return missing_;
  const size_t of_class = nccl_class_of(backend);
  if (of_class == kNcclClasses.size()) return "the group's backend is a " + c10::demangle(typeid(backend).name());
  if (!getters_[of_class]) return library_ + " has no " + kNcclClasses[of_class].get_communicator;
  try {
    return handle_of(backend) ? "" : "the group has no communicator on this device";
  } catch (const std::exception& error) {
    return error_text(error);
  }
}

std::optional<NcclCommunicator> Nccl::communicator(c10d::Backend& backend, c10::Device device) const {
  void* const handle = missing_.empty() ? handle_of(backend) : nullptr;
  if (!handle) return std::nullopt;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return NcclCommunicator(*this, handle, stream.native_handle());
}

void Nccl::relax_capture_mode() const {
  int mode = kCaptureModeRelaxed;
  if (exchange_capture_mode_) exchange_capture_mode_(&mode);  // an error is of earlier work, which others report
}

void NcclCommunicator::all_to_all(const std::byte* send, std::byte* receive, int64_t part_nbytes) const {
  const auto count = static_cast<size_t>(part_nbytes);
  check(nccl_.all_to_all_(send, receive, count, kNcclUint8, handle_, stream_), "ncclAlltoAll");
}

void NcclCommunicator::all_gather(const std::byte* send, std::byte* receive, int64_t nbytes) const {
  const auto count = static_cast<size_t>(nbytes);
  check(nccl_.all_gather_(send, receive, count, kNcclUint8, handle_, stream_), "ncclAllGather");
}

void NcclCommunicator::all_reduce(std::byte* data, int64_t nbytes, at::ScalarType dtype) const {
  const int of_nccl = dtype == at::kFloat ? kNcclFloat32 : dtype == at::kBFloat16 ? kNcclBfloat16 : kNcclFloat16;
  const size_t count = static_cast<size_t>(nbytes) / c10::elementSize(dtype);
  check(nccl_.all_reduce_(data, data, count, of_nccl, kNcclSum, handle_, stream_), "ncclAllReduce");
}

// Only a communicator that does not block its callers answers that a call is in progress. It would have to be asked for
// the end, and torch's watchdog may free it between the question whether it lives and that one.
void NcclCommunicator::check(int result, const char* function) const {
  if (result == kNcclSuccess) return;
  const char* const what = result == kNcclInProgress  // no error, so NCCL says no more about it
                               ? "The communicator does not block its callers: set FUSEDCOMM_NCCL=torch"
                               : nccl_.get_last_error_(nullptr);
  throw std::runtime_error(std::string(function) + " failed with code " + std::to_string(result) + " (" +
                           nccl_.get_error_string_(result) + "): " + what);
}

}  // namespace fusedcomm
