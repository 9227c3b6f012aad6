// Binds the CPU codec, which Python uses without an engine.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "codec/codec.h"
#include "gradients/grad_dtype.h"
#include "wire/names.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;

// The bindings check every tensor, because the codec trusts its pointers.
void check_on_cpu(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.is_contiguous(), name, " must be a contiguous CPU tensor, not ",
                    tensor.is_contiguous() ? "one on " : "a strided one on ", tensor.device());
}

// Checks a tensor of `nbytes` wire bytes, and returns its address.
std::byte* wire_bytes(const at::Tensor& tensor, int64_t nbytes, const char* name) {
  check_on_cpu(tensor, name);
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kByte, name, " must be uint8, not ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.numel() == nbytes, name, " must have ", nbytes, " bytes, not ", tensor.numel());
  auto* data = static_cast<std::byte*>(tensor.data_ptr());
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(data) % kAlignNbytes == 0, name, " must start at a multiple of ",
                    kAlignNbytes, " bytes");
  return data;
}

SliceList slice_list(const std::vector<at::Tensor>& slices) {
  SliceList list;
  for (const at::Tensor& slice : slices) {
    check_on_cpu(slice, "a slice");
    list.append(slice.data_ptr(), slice.numel(), grad_dtype_of(slice.scalar_type()));
  }
  return list;
}

BucketSlices bucket_slices(const std::vector<at::Tensor>& lossy, const std::vector<at::Tensor>& exact) {
  return {slice_list(lossy), slice_list(exact)};
}

// residual: fp32.
Residual residual_of(const std::optional<at::Tensor>& residual) {
  if (!residual) return {};
  check_on_cpu(*residual, "residual");
  TORCH_CHECK_TYPE(residual->scalar_type() == at::kFloat, "residual must be float32, not ", residual->scalar_type());
  return {residual->data_ptr<float>(), residual->numel()};
}

int64_t pack(const Codec& codec, const BucketLayout& layout, int64_t chunk, const std::vector<at::Tensor>& lossy,
             const std::vector<at::Tensor>& exact, float scale, const at::Tensor& out,
             const std::optional<at::Tensor>& residual) {
  const BucketSlices slices = bucket_slices(lossy, exact);
  std::byte* bytes = wire_bytes(out, layout.chunk_nbytes(), "out");
  const Residual kept = residual_of(residual);
  py::gil_scoped_release no_gil;
  return codec.pack({layout, chunk, slices, scale, bytes, kept});
}

void reduce(const Codec& codec, const BucketLayout& layout, const at::Tensor& parts, float scale, const at::Tensor& out,
            const std::optional<at::Tensor>& residual, int64_t chunk, const std::optional<BucketLayout>& to_layout,
            int64_t num_parts) {
  TORCH_CHECK_VALUE(num_parts >= 1, "num_parts=", num_parts, " is not possible: use 1 or more");
  const BucketLayout& to = to_layout ? *to_layout : layout;
  const std::byte* in = wire_bytes(parts, layout.chunk_nbytes(), "parts");
  std::byte* bytes = wire_bytes(out, to.part_stride * num_parts, "out");
  const Residual kept = residual_of(residual);
  py::gil_scoped_release no_gil;
  codec.reduce({layout, in, scale, to, bytes, num_parts, chunk, kept});
}

void unpack(const Codec& codec, const BucketLayout& layout, int64_t chunk, const at::Tensor& parts, float scale,
            const std::vector<at::Tensor>& lossy, const std::vector<at::Tensor>& exact, int64_t num_messages) {
  TORCH_CHECK_VALUE(num_messages >= 1, "num_messages=", num_messages, " is not possible: use 1 or more");
  const BucketSlices slices = bucket_slices(lossy, exact);
  const std::byte* in = wire_bytes(parts, layout.chunk_nbytes() * num_messages, "parts");
  py::gil_scoped_release no_gil;
  codec.unpack({layout, chunk, in, scale, slices, num_messages});
}

}  // namespace

void bind_codec(py::module_& m) {
  m.def("available_isas", &available_isas);
  py::class_<Codec>(m, "Codec")
      .def(py::init<const std::string&, int>(), py::arg("isa") = "auto", py::arg("num_threads") = 1)
      .def("pack", &pack, py::arg("layout"), py::arg("chunk"), py::arg("lossy"), py::arg("exact"), py::arg("scale"),
           py::arg("out"), py::arg("residual") = py::none())
      .def("reduce", &reduce, py::arg("layout"), py::arg("parts"), py::arg("scale"), py::arg("out"),
           py::arg("residual") = py::none(), py::arg("chunk") = 0, py::arg("to") = py::none(), py::arg("num_parts") = 1)
      .def("unpack", &unpack, py::arg("layout"), py::arg("chunk"), py::arg("parts"), py::arg("scale"), py::arg("lossy"),
           py::arg("exact"), py::arg("num_messages") = 1)
      .def_property_readonly("isa", &Codec::isa);
}

}  // namespace fusedcomm
