// Binds the wire dtypes by name, and the layout of messages.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "devices/slice_table.h"
#include "gradients/grad_dtype.h"
#include "wire/layout.h"
#include "wire/names.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;

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

// Returns a 1-D CPU tensor with a copy of the values.
template <typename T>
at::Tensor tensor_of(const std::vector<T>& values) {
  return at::from_blob(const_cast<T*>(values.data()), {static_cast<int64_t>(values.size())},
                       at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value))
      .clone();
}

// (offset, numel) of slices; of a hole the offset is kHole.
using Places = std::vector<std::pair<int64_t, int64_t>>;

std::vector<at::Tensor> tables_of(const BucketLayout& layout, bool exact, const Places& slices, int64_t tile,
                                  int64_t grad_nbytes) {
  std::vector<SlicePlace> places;
  for (const auto& [offset, numel] : slices) places.push_back({offset, numel});
  const SliceTable table = slice_table(layout, exact, places, tile, grad_nbytes);
  return {tensor_of(table.tile_offset), tensor_of(table.tile_run),    tensor_of(table.first),
          tensor_of(table.vectors),     tensor_of(table.starts),      tensor_of(table.ends),
          tensor_of(table.deltas),      tensor_of(table.slice_starts)};
}

Places with_holes(const Places& slices, int64_t grad_nbytes, bool in_one_run) {
  Holes holes(grad_nbytes, in_one_run);
  Places places;
  for (const auto& [offset, numel] : slices) {
    if (const int64_t hole = holes.append(offset, numel)) places.emplace_back(kHole, hole);
    places.emplace_back(offset, numel);
  }
  return places;
}

std::pair<int64_t, int64_t> bounds(const Range& range) { return {range.begin, range.end}; }

py::tuple names_of_wires() {
  py::list names;
  for (const WireRow& known : kWires) names.append(known.name);
  return py::tuple(names);
}

void bind_wires(py::module_& m) {
  m.attr("WIRE_LAYOUT_VERSION") = kWireLayoutVersion;
  m.attr("ALIGN_NBYTES") = kAlignNbytes;
  m.attr("GRAD_DTYPES") = py::tuple(py::cast(std::vector(std::begin(kGradDtypes), std::end(kGradDtypes))));
  m.def(
      "default_block_numel", [](const std::string& wire) { return default_block_numel(wire_from_name(wire)); },
      py::arg("wire"));
  m.attr("WIRES") = names_of_wires();
  m.def("wire_id", [](const std::string& wire) { return static_cast<int>(wire_from_name(wire)); }, py::arg("wire"));
  m.def("code_nbits", [](const std::string& wire) { return code_nbits(wire_from_name(wire)); }, py::arg("wire"));
  m.def("scale_nbytes", [](const std::string& wire) { return scale_nbytes(wire_from_name(wire)); }, py::arg("wire"));
  m.def("has_scales", [](const std::string& wire) { return has_scales(wire_from_name(wire)); }, py::arg("wire"));
  m.def("exactness", [](const std::string& wire) { return exactness(wire_from_name(wire)); }, py::arg("wire"));
}

void bind_layout_classes(py::module_& m) {
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
}

}  // namespace

void bind_layout(pybind11::module_& m) {
  bind_wires(m);
  bind_layout_classes(m);
  m.def(
      "bucket_layout",
      [](const std::string& wire, int64_t block, int64_t num_parts, int64_t exact_numel, int64_t lossy_numel,
         int64_t max_chunk_nbytes) {
        return bucket_layout(wire_from_name(wire), block, num_parts, exact_numel, lossy_numel, max_chunk_nbytes);
      },
      py::arg("wire"), py::arg("block"), py::arg("num_parts"), py::arg("exact_numel"), py::arg("lossy_numel"),
      py::arg("max_chunk_nbytes"));
  m.def(
      "bucket_layouts",
      [](const std::vector<std::tuple<std::string, int64_t, int64_t>>& formats, int64_t num_parts, int64_t exact_numel,
         int64_t max_chunk_nbytes) {
        std::vector<WireFormat> wires;
        for (const auto& [wire, block, numel] : formats) wires.push_back({wire_from_name(wire), block, numel});
        return bucket_layouts(wires, num_parts, exact_numel, max_chunk_nbytes);
      },
      py::arg("formats"), py::arg("num_parts"), py::arg("exact_numel"), py::arg("max_chunk_nbytes"));
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
  m.attr("HOLE") = kHole;
  m.def("slice_table", &tables_of, py::arg("layout"), py::arg("exact"), py::arg("slices"), py::arg("tile"),
        py::arg("grad_nbytes"));
  m.def("with_holes", &with_holes, py::arg("slices"), py::arg("grad_nbytes"), py::arg("in_one_run") = true);
}

}  // namespace fusedcomm
