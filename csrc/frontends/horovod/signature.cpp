#include "frontends/horovod/signature.h"

#include <array>
#include <functional>
#include <numeric>
#include <sstream>
#include <stdexcept>

namespace fusedcomm::horovod {
namespace {

constexpr std::array<const char*, 7> kKinds = {"allreduce",     "allgather", "broadcast", "alltoall",
                                               "reducescatter", "barrier",   "join"};
constexpr std::array<const char*, 5> kOps = {"Average", "Sum", "Min", "Max", "Product"};

std::string shape_text(const std::vector<int64_t>& shape) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < shape.size(); ++i) text << (i != 0 ? ", " : "") << shape[i];
  text << "]";
  return text.str();
}

// Whether the ranks' tensors may differ in their first dimension.
bool rows_may_differ(Kind kind) { return kind == Kind::kAllgather || kind == Kind::kAlltoall; }

bool same_shape(const Signature& a, const std::vector<int64_t>& x, const std::vector<int64_t>& y) {
  if (!rows_may_differ(a.kind)) return x == y;
  return x.size() == y.size() &&
         std::vector<int64_t>(x.begin() + !x.empty(), x.end()) == std::vector<int64_t>(y.begin() + !y.empty(), y.end());
}

template <typename T>
std::string difference(const Signature& a, const char* what, int rank_a, const T& x, int rank_b, const T& y) {
  std::ostringstream text;
  text.precision(17);
  text << "fusedcomm: the ranks do not agree on " << a.key() << ": its " << what << " is " << x << " on rank " << rank_a
       << " and " << y << " on rank " << rank_b << ". Submit the same on every rank, or use another name";
  return text.str();
}

}  // namespace

const char* kind_name(Kind kind) { return kKinds.at(static_cast<size_t>(kind)); }
const char* op_name(Op op) { return kOps.at(static_cast<size_t>(op)); }

Kind kind_of(const std::string& name) {
  for (size_t i = 0; i < kKinds.size(); ++i) {
    if (name == kKinds[i]) return static_cast<Kind>(i);
  }
  throw std::invalid_argument("fusedcomm: there is no collective " + name);
}

int64_t TensorMeta::numel() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

std::string Signature::tensor_name(size_t i) const {
  if (!tensor_names.empty()) return tensor_names.at(i);
  return tensors.size() == 1 ? name : name + "." + std::to_string(i);
}

int64_t Signature::numel() const {
  int64_t sum = 0;
  for (const TensorMeta& tensor : tensors) sum += tensor.numel();
  return sum;
}

bool Signature::fuses_with(const Signature& other) const {
  if (kind != Kind::kAllreduce || other.kind != kind || tensors.empty()) return false;
  if (op != other.op || prescale != other.prescale || postscale != other.postscale) return false;
  if (wire != other.wire || device != other.device || other.tensors.empty()) return false;
  const int8_t dtype = tensors.front().dtype;
  for (const Signature* of : {this, &other}) {
    for (const TensorMeta& tensor : of->tensors) {
      if (tensor.dtype != dtype) return false;
    }
  }
  return true;
}

bool Signature::operator==(const Signature& other) const {
  return kind == other.kind && name == other.name && op == other.op && prescale == other.prescale &&
         postscale == other.postscale && root == other.root && wire == other.wire && device == other.device &&
         tensors == other.tensors && splits == other.splits && tensor_names == other.tensor_names;
}

void Signature::write(Writer& out) const {
  out.number(kind);
  out.text(name);
  out.number(op);
  out.number(prescale);
  out.number(postscale);
  out.number(root);
  out.text(wire);
  out.text(device);
  out.number<uint32_t>(static_cast<uint32_t>(tensors.size()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    out.number(tensors[i].dtype);
    out.numbers(tensors[i].shape);
    out.text(i < dtype_names.size() ? dtype_names[i] : "");
  }
  out.numbers(splits);
  out.text(problem);
  out.number<uint32_t>(static_cast<uint32_t>(tensor_names.size()));
  for (const std::string& each : tensor_names) out.text(each);
}

Signature Signature::read(Reader& in) {
  Signature of;
  of.kind = in.number<Kind>();
  of.name = in.text();
  of.op = in.number<Op>();
  of.prescale = in.number<double>();
  of.postscale = in.number<double>();
  of.root = in.number<int32_t>();
  of.wire = in.text();
  of.device = in.text();
  of.tensors.resize(in.number<uint32_t>());
  for (TensorMeta& tensor : of.tensors) {
    tensor.dtype = in.number<int8_t>();
    tensor.shape = in.numbers<int64_t>();
    of.dtype_names.push_back(in.text());
  }
  of.splits = in.numbers<int64_t>();
  of.problem = in.text();
  of.tensor_names.resize(in.number<uint32_t>());
  for (std::string& each : of.tensor_names) each = in.text();
  return of;
}

std::string mismatch(const Signature& a, int rank_a, const Signature& b, int rank_b) {
  const auto differ = [&](const char* what, const auto& x, const auto& y) {
    return difference(a, what, rank_a, x, rank_b, y);
  };
  if (a.tensors.size() != b.tensors.size()) return differ("number of tensors", a.tensors.size(), b.tensors.size());
  if (a.op != b.op) return differ("op", std::string(op_name(a.op)), std::string(op_name(b.op)));
  if (a.root != b.root) return differ("root rank", a.root, b.root);
  if (a.prescale != b.prescale) return differ("prescale_factor", a.prescale, b.prescale);
  if (a.postscale != b.postscale) return differ("postscale_factor", a.postscale, b.postscale);
  if (a.wire != b.wire) {
    const auto text = [](const std::string& wire) { return wire.empty() ? std::string("none") : wire; };
    return differ("compression", text(a.wire), text(b.wire));
  }
  if (a.tensor_names != b.tensor_names && a.tensor_names.size() == b.tensor_names.size()) {
    size_t i = 0;
    while (a.tensor_names[i] == b.tensor_names[i]) ++i;
    return differ("name of a tensor", a.tensor_names[i], b.tensor_names[i]);
  }
  if (a.device != b.device) return differ("device", a.device, b.device);
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    const std::string of = a.tensors.size() > 1 ? " of tensor " + std::to_string(i) : "";
    if (a.tensors[i].dtype != b.tensors[i].dtype) {
      return differ(("dtype" + of).c_str(), a.dtype_names[i], b.dtype_names[i]);
    }
    if (same_shape(a, a.tensors[i].shape, b.tensors[i].shape)) continue;
    const char* const what = rows_may_differ(a.kind) ? "shape past the first dimension" : "shape";
    return differ((what + of).c_str(), shape_text(a.tensors[i].shape), shape_text(b.tensors[i].shape));
  }
  return "";
}

}  // namespace fusedcomm::horovod
