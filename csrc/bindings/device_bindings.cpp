// Binds devices, their kernels and their transports.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "bindings/bindings.h"
#include "devices/cpu_device.h"
#include "devices/cuda_device.h"
#include "engine/sums.h"
#include "gradients/grad_dtype.h"
#include "transport/c10d_transport.h"
#include "transport/link_timer.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;

// Collects the kernels of one configuration: each load() adds one.
class KernelLoader {
 public:
  KernelLoader(std::shared_ptr<const CudaDriver> driver, int64_t tile_numel) : driver_(std::move(driver)) {
    kernels_.tile_numel = tile_numel;
  }

  void load(const KernelKey& key, const std::string& cubin, const std::string& symbol, uint32_t num_threads,
            uint32_t shared_nbytes, int num_scratch_pointers) {
    kernels_.kernels[key] = {driver_->load(cubin, symbol, shared_nbytes), num_threads, shared_nbytes,
                             num_scratch_pointers};
  }

  const CudaKernels& kernels() const { return kernels_; }
  const std::shared_ptr<const CudaDriver>& driver() const { return driver_; }

 private:
  std::shared_ptr<const CudaDriver> driver_;
  CudaKernels kernels_;
};

// An argument that the kernel does not use may be None. `in_wire`: None if it is `wire`. Throws if a needed one is
// None.
KernelKey make_key(const std::string& kernel, const std::optional<std::string>& wire, int64_t block,
                   std::optional<at::ScalarType> grad_dtype, const std::optional<std::string>& in_wire, bool feedback,
                   bool sums) {
  KernelKey key{kernel};
  if (kernel == kScaleKernel) return normalised(key);
  TORCH_CHECK_VALUE(wire, "fusedcomm: kernel ", kernel, " needs a wire");
  TORCH_CHECK_VALUE(grad_dtype || kernel == kReduceKernel, "fusedcomm: kernel ", kernel, " needs a gradient dtype");
  key.wire = wire_from_name(*wire);
  key.block_numel = block;
  if (grad_dtype) key.grad_dtype = grad_dtype_of(*grad_dtype);
  key.in_wire = in_wire ? wire_from_name(*in_wire) : key.wire;
  key.feedback = feedback;
  key.sums = sums;
  return normalised(key);
}

std::optional<std::string> wire_of(const KernelKey& key) {
  if (key.kernel == kScaleKernel) return std::nullopt;
  return wire_name(key.wire);
}

std::optional<std::string> in_wire_of(const KernelKey& key) {
  if (key.kernel != kReduceKernel || key.in_wire == key.wire) return std::nullopt;
  return wire_name(key.in_wire);
}

std::optional<at::ScalarType> grad_type_of(const KernelKey& key) {
  if (key.kernel == kReduceKernel) return std::nullopt;
  return kGradDtypes[static_cast<size_t>(key.grad_dtype)];
}

// The state that pickle stores of a key: its class and the arguments of make_key, in order.
py::tuple reduced(const py::object& key) {
  py::list arguments;
  for (const char* name : {"kernel", "wire", "block", "grad_dtype", "in_wire", "feedback", "sums"}) {
    arguments.append(key.attr(name));
  }
  return py::make_tuple(key.attr("__class__"), py::tuple(arguments));
}

void bind_kernel_key(py::module_& m) {
  py::class_<KernelKey>(m, "KernelKey")
      .def(py::init(&make_key), py::arg("kernel"), py::arg("wire") = py::none(), py::arg("block") = kDefaultBlockNumel,
           py::arg("grad_dtype") = py::none(), py::arg("in_wire") = py::none(), py::arg("feedback") = false,
           py::arg("sums") = false)
      .def_readonly("kernel", &KernelKey::kernel)
      .def_property_readonly("wire", &wire_of)
      .def_readonly("block", &KernelKey::block_numel)
      .def_property_readonly("grad_dtype", &grad_type_of)
      .def_property_readonly("in_wire", &in_wire_of)
      .def_readonly("feedback", &KernelKey::feedback)
      .def_readonly("sums", &KernelKey::sums)
      .def(
          "__eq__", [](const KernelKey& a, const KernelKey& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const KernelKey& key) { return std::hash<std::string>{}(to_string(key)); })
      .def("__repr__", [](const KernelKey& key) { return to_string(key); })
      .def("__reduce__", &reduced);
}

std::vector<std::string> kernel_params(const std::string& kernel) {
  if (kernel == PackLaunch::kName) return param_types<PackLaunch>();
  if (kernel == ReduceLaunch::kName) return param_types<ReduceLaunch>();
  if (kernel == UnpackLaunch::kName) return param_types<UnpackLaunch>();
  TORCH_CHECK_VALUE(kernel == ScaleLaunch::kName, "fusedcomm: no kernel is called '", kernel, "'");
  return param_types<ScaleLaunch>();
}

}  // namespace

void bind_devices(py::module_& m) {
  m.attr("TORCHS_CUDA") = Nccl::kLibrary;
  m.attr("MAX_SCRATCH_POINTERS") = kMaxScratchPointers;
  m.def("kernel_params", &kernel_params, py::arg("kernel"));
  bind_kernel_key(m);

  py::class_<CudaDriver, std::shared_ptr<CudaDriver>>(m, "CudaDriver")
      .def(py::init<const std::string&>(), py::arg("library"));
  py::class_<KernelLoader>(m, "KernelLoader")
      .def(py::init([](std::shared_ptr<CudaDriver> driver, int64_t tile_numel) {
             return std::make_unique<KernelLoader>(std::move(driver), tile_numel);
           }),
           py::arg("driver"), py::arg("tile_numel"))
      .def("load", &KernelLoader::load, py::kw_only(), py::arg("key"), py::arg("cubin"), py::arg("symbol"),
           py::arg("num_threads"), py::arg("shared_nbytes"), py::arg("num_scratch_pointers"));

  py::class_<Device, std::shared_ptr<Device>>(m, "Device").def_property_readonly("isa", &Device::isa);
  py::class_<CpuDevice, Device, std::shared_ptr<CpuDevice>>(m, "CpuDevice")
      .def(py::init<const std::string&, int, bool>(), py::kw_only(), py::arg("isa"), py::arg("codec_threads"),
           py::arg("forced_sync"));
  py::class_<CudaDevice, Device, std::shared_ptr<CudaDevice>>(m, "CudaDevice")
      .def(py::init([](const KernelLoader& kernels, at::Device device, const std::string& isa,
                       int64_t num_pack_programs, bool two_levels, bool forced_sync) {
             return std::make_shared<CudaDevice>(kernels.driver(), kernels.kernels(), device, isa, num_pack_programs,
                                                 two_levels, forced_sync);
           }),
           py::kw_only(), py::arg("kernels"), py::arg("device"), py::arg("isa"), py::arg("num_pack_programs"),
           py::arg("two_levels"), py::arg("forced_sync"), NoGil())
      .def("warm_up", &CudaDevice::warm_up, NoGil())
      .def_property_readonly("streams", &CudaDevice::streams);

  m.def("all_to_all_s", &all_to_all_s, py::arg("backend"), py::arg("nbytes"), py::arg("rounds"), NoGil());
  py::class_<TensorTransport, std::shared_ptr<TensorTransport>>(m, "TensorTransport")
      .def_property_readonly("why_through_torch", py::cpp_function(&TensorTransport::why_through_torch, NoGil()));
  py::class_<C10dTransport, TensorTransport, std::shared_ptr<C10dTransport>>(m, "C10dTransport")
      .def(
          "warm_up",
          [](C10dTransport& transport, const CudaDevice& device) {
            transport.warm_up([&](Channel channel) { return device.stream_of(role_of(channel)); });
          },
          py::arg("device"), NoGil())
      .def("give_up", &C10dTransport::give_up, NoGil())
      .def("own_backend", &C10dTransport::own_backend, NoGil());
  py::class_<HostTransport, C10dTransport, std::shared_ptr<HostTransport>>(m, "HostTransport")
      .def(py::init<BackendPtr, BackendPtr, int>(), py::arg("scatter"), py::arg("gather"), py::kw_only(),
           py::arg("max_sending"));
  py::class_<StreamTransport, C10dTransport, std::shared_ptr<StreamTransport>>(m, "StreamTransport")
      .def(py::init([](const BackendPtr& backend, at::Device device, const std::string& nccl,
                       const std::string& through_torch) {
             const auto found = std::make_shared<Nccl>(nccl, symbols_of(nccl), through_torch);
             return std::make_shared<StreamTransport>(backend, device, found);
           }),
           py::arg("backend"), py::arg("device"), py::kw_only(), py::arg("nccl"), py::arg("through_torch") = "");
}

}  // namespace fusedcomm
