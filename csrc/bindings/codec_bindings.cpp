#include "bindings/codec_bindings.h"

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "devices/slice_table.h"
#include "gradients/grad_dtype.h"
#include "wire/names.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;

// Every tensor is checked here: the codec trusts its pointers.
void check_on_cpu(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.is_contiguous(), name, " must be a contiguous CPU tensor, not ",
                    tensor.is_contiguous() ? "one on " : "a strided one on ", tensor.device());
}

std::byte* wire_bytes(const at::Tensor& tensor, int64_t nbytes, const char* name) {
  check_on_cpu(tensor, name);
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kByte, name, " must be uint8, not ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.numel() == nbytes, name, " must have ", nbytes, " bytes, not ", tensor.numel());
  auto* data = static_cast<std::byte*>(tensor.data_ptr());
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(data) % kAlignNbytes == 0, name, " must start at a multiple of ",
                    kAlignNbytes, " bytes");
  return data;
}

Stream stream_of(const std::vector<at::Tensor>& slices) {
  Stream stream;
  for (const at::Tensor& slice : slices) {
    check_on_cpu(slice, "a slice");
    stream.append(slice.data_ptr(), slice.numel(), grad_dtype_of(slice.scalar_type()));
  }
  return stream;
}

BucketStreams streams_of(const std::vector<at::Tensor>& lossy, const std::vector<at::Tensor>& exact) {
  return {stream_of(lossy), stream_of(exact)};
}

// (seed, parameter, step, source) and (format, bytes, numel); see reference.py.
using NoiseTuple = std::tuple<uint64_t, uint32_t, uint32_t, uint32_t>;
using ResidualTuple = std::tuple<std::string, at::Tensor, int64_t>;

Encoding encoding_of(const std::optional<NoiseTuple>& noise, const std::optional<ResidualTuple>& residual) {
  Encoding encoding;
  if (noise) {
    const auto& [seed, parameter, step, source] = *noise;
    encoding.stochastic = true;
    encoding.noise = {seed, parameter, step, source};
  }
  if (residual) {
    const auto& [format, bytes, numel] = *residual;
    Residual& kept = encoding.residual;
    kept.format = residual_format_from_name(format);
    kept.numel = numel;
    kept.data = wire_bytes(bytes, residual_nbytes(kept.format, numel), "residual");
  }
  return encoding;
}

int64_t pack(const Codec& codec, const BucketLayout& layout, int64_t chunk, const std::vector<at::Tensor>& lossy,
             const std::vector<at::Tensor>& exact, float scale, const at::Tensor& out,
             const std::optional<NoiseTuple>& noise, const std::optional<ResidualTuple>& residual) {
  const BucketStreams streams = streams_of(lossy, exact);
  std::byte* bytes = wire_bytes(out, layout.chunk_nbytes(), "out");
  const Encoding encoding = encoding_of(noise, residual);
  py::gil_scoped_release no_gil;
  return codec.pack({layout, chunk, streams, scale, bytes, encoding});
}

void reduce(const Codec& codec, const BucketLayout& layout, const at::Tensor& parts, float scale, const at::Tensor& out,
            const std::optional<NoiseTuple>& noise, const std::optional<ResidualTuple>& residual, int64_t chunk,
            int64_t first_part, const std::optional<BucketLayout>& to_layout, int64_t num_parts) {
  TORCH_CHECK_VALUE(num_parts >= 1, "num_parts=", num_parts, " is not possible: use 1 or more");
  const BucketLayout& to = to_layout ? *to_layout : layout;
  const std::byte* in = wire_bytes(parts, layout.chunk_nbytes(), "parts");
  std::byte* bytes = wire_bytes(out, to.part_stride * num_parts, "out");
  const Encoding encoding = encoding_of(noise, residual);
  py::gil_scoped_release no_gil;
  codec.reduce({layout, in, scale, to, bytes, num_parts, chunk, first_part, encoding});
}

void unpack(const Codec& codec, const BucketLayout& layout, int64_t chunk, const at::Tensor& parts, float scale,
            const std::vector<at::Tensor>& lossy, const std::vector<at::Tensor>& exact, int64_t num_messages) {
  TORCH_CHECK_VALUE(num_messages >= 1, "num_messages=", num_messages, " is not possible: use 1 or more");
  const BucketStreams streams = streams_of(lossy, exact);
  const std::byte* in = wire_bytes(parts, layout.chunk_nbytes() * num_messages, "parts");
  py::gil_scoped_release no_gil;
  codec.unpack({layout, chunk, in, scale, streams, num_messages});
}

int64_t scale_in_place(const Codec& codec, const std::vector<at::Tensor>& slices, float scale) {
  const Stream stream = stream_of(slices);
  py::gil_scoped_release no_gil;
  return codec.scale_in_place(stream, scale);
}

std::string to_string(const PartLayout& part) {
  std::ostringstream text;
  text << "PartLayout(exact_numel=" << part.exact_numel << ", lossy_numel=" << part.lossy_numel
       << ", scale_offset=" << part.scale_offset << ", code_offset=" << part.code_offset << ", nbytes=" << part.nbytes
       << ")";
  return text.str();
}

std::string to_string(const BucketLayout& layout) {
  std::ostringstream text;
  text << "BucketLayout(wire='" << wire_name(layout.wire) << "', block_numel=" << layout.block_numel
       << ", num_parts=" << layout.num_parts << ", num_chunks=" << layout.num_chunks
       << ", exact_numel=" << layout.exact_numel << ", lossy_numel=" << layout.lossy_numel
       << ", part=" << to_string(layout.part) << ")";
  return text.str();
}

template <typename T>
at::Tensor tensor_of(const std::vector<T>& values) {
  return at::from_blob(const_cast<T*>(values.data()), {static_cast<int64_t>(values.size())},
                       at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value))
      .clone();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> stream_table(const BucketLayout& layout, bool exact,
                                                            const std::vector<std::pair<int64_t, int64_t>>& slices,
                                                            int64_t tile) {
  std::vector<SlicePlace> places;
  for (const auto& [offset, numel] : slices) places.push_back({offset, numel});
  const SliceTable table = slice_table(layout, exact, places, tile);
  return {tensor_of(table.starts), tensor_of(table.offsets), tensor_of(table.first)};
}

std::pair<int64_t, int64_t> bounds(const Range& range) { return {range.begin, range.end}; }

py::tuple names_of_wires() {
  py::list names;
  for (const NamedWire& known : kWires) names.append(known.name);
  return py::tuple(names);
}

void bind_layout(py::module_& m) {
  m.attr("WIRE_LAYOUT_VERSION") = kWireLayoutVersion;
  m.attr("ALIGN_NBYTES") = kAlignNbytes;
  m.attr("DEFAULT_BLOCK_NUMEL") = kDefaultBlockNumel;
  m.attr("ROTATION_NUMEL") = kRotationNumel;
  m.attr("ROTATION_SIGNS") = kRotationSigns;
  m.attr("GRAD_DTYPES") = py::tuple(py::cast(std::vector(std::begin(kGradDtypes), std::end(kGradDtypes))));
  m.def(
      "default_block_numel", [](const std::string& wire) { return default_block_numel(wire_from_name(wire)); },
      py::arg("wire"));
  m.attr("WIRES") = names_of_wires();
  m.attr("RESIDUAL_FORMATS") =
      py::tuple(py::cast(std::vector<std::string>(std::begin(kResidualFormatNames), std::end(kResidualFormatNames))));
  m.def("wire_id", [](const std::string& wire) { return static_cast<int>(wire_from_name(wire)); }, py::arg("wire"));
  m.def("code_nbits", [](const std::string& wire) { return code_nbits(wire_from_name(wire)); }, py::arg("wire"));
  m.def("scale_nbytes", [](const std::string& wire) { return scale_nbytes(wire_from_name(wire)); }, py::arg("wire"));
  m.def("has_scales", [](const std::string& wire) { return has_scales(wire_from_name(wire)); }, py::arg("wire"));
  m.def("exactness", [](const std::string& wire) { return exactness(wire_from_name(wire)); }, py::arg("wire"));
  m.attr("MIN_BLOCK_NUMEL") = kMinBlockNumel;
  m.attr("MAX_BLOCK_NUMEL") = kMaxBlockNumel;

  py::class_<PartLayout>(m, "PartLayout")
      .def_readonly("exact_numel", &PartLayout::exact_numel)
      .def_readonly("lossy_numel", &PartLayout::lossy_numel)
      .def_readonly("scale_offset", &PartLayout::scale_offset)
      .def_readonly("code_offset", &PartLayout::code_offset)
      .def_readonly("nbytes", &PartLayout::nbytes)
      .def("__repr__", [](const PartLayout& part) { return to_string(part); });

  py::class_<BucketLayout>(m, "BucketLayout")
      .def_property_readonly("wire", [](const BucketLayout& layout) { return wire_name(layout.wire); })
      .def_readonly("block_numel", &BucketLayout::block_numel)
      .def_readonly("rotated", &BucketLayout::rotated)
      .def_readonly("num_parts", &BucketLayout::num_parts)
      .def_readonly("num_chunks", &BucketLayout::num_chunks)
      .def_readonly("exact_numel", &BucketLayout::exact_numel)
      .def_readonly("lossy_numel", &BucketLayout::lossy_numel)
      .def_readonly("part", &BucketLayout::part)
      .def_readonly("part_offset", &BucketLayout::part_offset)
      .def_readonly("part_stride", &BucketLayout::part_stride)
      .def_property_readonly("padded_numel", &BucketLayout::padded_numel)
      .def_property_readonly("chunk_nbytes", &BucketLayout::chunk_nbytes)
      .def(
          "lossy_range",
          [](const BucketLayout& layout, int64_t chunk, int64_t part) {
            return bounds(layout.lossy_range(chunk, part));
          },
          py::arg("chunk"), py::arg("part"))
      .def(
          "exact_range",
          [](const BucketLayout& layout, int64_t chunk, int64_t part) {
            return bounds(layout.exact_range(chunk, part));
          },
          py::arg("chunk"), py::arg("part"))
      .def("__repr__", [](const BucketLayout& layout) { return to_string(layout); });

  m.def(
      "part_layout",
      [](const std::string& wire, int64_t block, int64_t exact_numel, int64_t lossy_numel) {
        check_block_numel(block);
        TORCH_CHECK_VALUE(exact_numel >= 0 && lossy_numel >= 0, "part_layout: numels must not be negative");
        return part_layout(wire_from_name(wire), block, exact_numel, lossy_numel);
      },
      py::arg("wire"), py::arg("block"), py::arg("exact_numel"), py::arg("lossy_numel"));
  m.def(
      "bucket_layout",
      [](const std::string& wire, int64_t block, int64_t num_parts, int64_t exact_numel, int64_t lossy_numel,
         int64_t max_chunk_nbytes, bool rotated) {
        return bucket_layout(wire_from_name(wire), block, num_parts, exact_numel, lossy_numel, max_chunk_nbytes,
                             rotated);
      },
      py::arg("wire"), py::arg("block"), py::arg("num_parts"), py::arg("exact_numel"), py::arg("lossy_numel"),
      py::arg("max_chunk_nbytes"), py::arg("rotated") = false);
  m.def(
      "bucket_layouts",
      [](const std::vector<std::tuple<std::string, int64_t, bool, int64_t>>& streams, int64_t num_parts,
         int64_t exact_numel, int64_t max_chunk_nbytes) {
        std::vector<StreamWire> wires;
        for (const auto& [wire, block, rotated, numel] : streams) {
          wires.push_back({wire_from_name(wire), block, rotated, numel});
        }
        return bucket_layouts(wires, num_parts, exact_numel, max_chunk_nbytes);
      },
      py::arg("streams"), py::arg("num_parts"), py::arg("exact_numel"), py::arg("max_chunk_nbytes"));
  m.def(
      "with_num_parts",
      [](BucketLayout layout, int64_t num_parts) {
        layout.num_parts = num_parts;
        return layout;
      },
      py::arg("layout"), py::arg("num_parts"));
  m.def(
      "host_layouts",
      [](const std::vector<BucketLayout>& layouts, const std::string& wire, int64_t ranks_per_host) {
        return host_layouts(layouts, wire_from_name(wire), ranks_per_host);
      },
      py::arg("layouts"), py::arg("wire"), py::arg("ranks_per_host"));
  m.def(
      "residual_nbytes",
      [](const std::string& format, int64_t numel) {
        return residual_nbytes(residual_format_from_name(format), numel);
      },
      py::arg("format"), py::arg("numel"));
  m.def("stream_table", &stream_table, py::arg("layout"), py::arg("exact"), py::arg("slices"), py::arg("tile"));
}

}  // namespace

void bind_codec(py::module_& m) {
  bind_layout(m);
  m.def("available_isas", &available_isas);
  py::class_<Codec>(m, "Codec")
      .def(py::init<const std::string&, int>(), py::arg("isa") = "auto", py::arg("num_threads") = 1)
      .def("pack", &pack, py::arg("layout"), py::arg("chunk"), py::arg("lossy"), py::arg("exact"), py::arg("scale"),
           py::arg("out"), py::arg("noise") = py::none(), py::arg("residual") = py::none())
      .def("reduce", &reduce, py::arg("layout"), py::arg("parts"), py::arg("scale"), py::arg("out"),
           py::arg("noise") = py::none(), py::arg("residual") = py::none(), py::arg("chunk") = 0,
           py::arg("first_part") = 0, py::arg("to") = py::none(), py::arg("num_parts") = 1)
      .def("unpack", &unpack, py::arg("layout"), py::arg("chunk"), py::arg("parts"), py::arg("scale"), py::arg("lossy"),
           py::arg("exact"), py::arg("num_messages") = 1)
      .def("scale_in_place", &scale_in_place, py::arg("slices"), py::arg("scale"))
      .def_property_readonly("isa", &Codec::isa)
      .def_property_readonly("num_threads", &Codec::num_threads);
}

}  // namespace fusedcomm
