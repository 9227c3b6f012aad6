// What Python takes of the simulated accelerator: see tests/helpers/on_streams.py. A process is one rank, on device 0.
// The Python classes of what is returned are those of torch and of fusedcomm's own extension.
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "require.h"
#include "sim_accelerator.h"
#include "sim_backend.h"
#include "sim_kernels.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace py = pybind11;

namespace {

// Makes the simulated accelerator torch's, as streams and backward passes in Python need.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
  // FSDP2's all-gathered parameters have memory only while they are used.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    REQUIRE(nbytes == 0 || storage.nbytes() == 0, "a storage of %zu bytes gets %zu", storage.nbytes(), nbytes);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(storage.allocator()->allocate(nbytes));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

}  // namespace

// Call it first. Random pauses of streams derive from the seed.
EXPORTED void sim_begin(uint64_t seed) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  sim::set_seed(seed);
}

// A new reference to the product's device. Call it with the GIL, as the next one.
EXPORTED PyObject* sim_device() {
  return py::cast(sim::cuda_device(sim::device(0), /*two_levels=*/true)).release().ptr();
}

// A new reference to a backend for the simulated accelerator, whose bytes go over this gloo backend.
EXPORTED PyObject* sim_backend(PyObject* gloo) {
  const auto over = py::handle(gloo).cast<c10::intrusive_ptr<c10d::Backend>>();
  return py::cast(sim::make_backend(over, {.takes_async = true})).release().ptr();
}

// See free_memory(). Call it without the GIL.
EXPORTED void sim_free_memory() { sim::free_memory(0); }

// From now on this thread's calls count.
EXPORTED void sim_count() {
  static thread_local std::optional<sim::CountCalls> counts;
  counts.emplace(true);
}

// How often threads that count have waited for the device.
EXPORTED int64_t sim_waits() { return sim::calls(0).waited_on_host; }
