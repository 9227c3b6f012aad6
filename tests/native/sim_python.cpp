// What Python takes of the simulated accelerator: see tests/helpers/on_streams.py. A process is one rank, on device 0.
// The Python classes of what is returned are those of torch and of fusedcomm's own extension.
#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "require.h"
#include "sim_accelerator.h"
#include "sim_backend.h"
#include "sim_kernels.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace py = pybind11;

// Call it first. Random pauses of streams derive from the seed.
EXPORTED void sim_begin(uint64_t seed) {
  sim::become_torchs_accelerator();
  sim::set_seed(seed);
}

// A new reference to the product's device with the kernels of these keys, a list. Call it with the GIL, as the next
// one.
EXPORTED PyObject* sim_device(PyObject* keys, bool two_levels) {
  const auto kernels = py::handle(keys).cast<std::vector<fusedcomm::KernelKey>>();
  return py::cast(sim::cuda_device(sim::device(0), two_levels, /*forced_sync=*/false, kernels)).release().ptr();
}

// A new reference to a backend for the simulated accelerator, whose bytes go over this gloo backend.
EXPORTED PyObject* sim_backend(PyObject* gloo) {
  const auto over = py::handle(gloo).cast<c10::intrusive_ptr<c10d::Backend>>();
  return py::cast(sim::make_backend(over, {.takes_async = true})).release().ptr();
}

// See free_memory(). Call it without the GIL.
EXPORTED void sim_free_memory() { sim::free_memory(0); }

// Blocks of the device's memory that somebody has.
EXPORTED int64_t sim_num_blocks() { return sim::num_blocks(0); }

// Events that the allocator would have recorded so far; see Calls.
EXPORTED int64_t sim_allocators_events() { return sim::calls(0).of_allocator; }

// From now on waits count.
EXPORTED void sim_count() { sim::count_waits_of_all_threads(); }

// How often a thread has waited for the device, those of autograd included.
EXPORTED int64_t sim_waits() { return sim::calls(0).waited_on_host; }
