// What a rank asks for: a collective by its name, with everything that the ranks must agree on. Uses no torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "frontends/horovod/bytes.h"

namespace fusedcomm::horovod {

enum class Kind : uint8_t { kAllreduce, kAllgather, kBroadcast, kAlltoall, kReducescatter, kBarrier, kJoin };
enum class Op : uint8_t { kAverage, kSum, kMin, kMax, kProduct };

// "allreduce" and so on. kind_of() throws std::invalid_argument.
const char* kind_name(Kind kind);
Kind kind_of(const std::string& name);
const char* op_name(Op op);

struct TensorMeta {
  int8_t dtype = 0;  // c10::ScalarType
  std::vector<int64_t> shape;

  bool operator==(const TensorMeta& other) const { return dtype == other.dtype && shape == other.shape; }
  int64_t numel() const;
};

// A request is a unit: a grouped collective is one request with several tensors.
struct Signature {
  Kind kind = Kind::kAllreduce;
  std::string name;
  Op op = Op::kSum;
  double prescale = 1, postscale = 1;
  int32_t root = 0;            // in the process set
  std::string wire;            // empty: the tensors' own dtype
  std::string device = "cpu";  // type of the tensors' device
  std::vector<TensorMeta> tensors;
  std::vector<std::string> dtype_names;  // of the tensors, for people; not compared
  std::vector<int64_t> splits;           // alltoall: rows to each rank of the set
  std::string problem;  // why this rank cannot take part: every rank gets it as an error. Empty: it can
  // What the wires of a configuration know the tensors by; empty: by `name`, and its number in a group.
  std::vector<std::string> tensor_names;

  std::string tensor_name(size_t i) const;
  std::string key() const { return std::string(kind_name(kind)) + "." + name; }
  int64_t numel() const;
  // Whether rank 0 may give it a number, which ranks then send in its place: it is the same on every rank.
  bool may_have_id() const { return kind == Kind::kAllreduce; }
  // Whether two requests may share a bucket.
  bool fuses_with(const Signature& other) const;
  bool operator==(const Signature& other) const;

  void write(Writer& out) const;
  static Signature read(Reader& in);
};

// Why two ranks' requests of one name cannot be one collective; empty if they can. Ranks are of the job.
std::string mismatch(const Signature& a, int rank_a, const Signature& b, int rank_b);

}  // namespace fusedcomm::horovod
