// Which parameters are together in a bucket.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fusedcomm {

// What decides the bucket of a parameter.
struct Piece {
  c10::ScalarType dtype = c10::ScalarType::Float;
  int64_t nbytes = 0;
  bool is_sparse = false;  // its gradient is a sparse tensor, which has a bucket of its own
  int64_t group = -1;      // those of a group share a bucket for each dtype, of any size; -1: no group
};

struct BucketCaps {
  int64_t first_nbytes = 0;  // of the first bucket of each dtype: it is small, so that sending begins early
  int64_t nbytes = 0;        // of the others
};

// Buckets in the order in which they are handed over. A bucket is a list of indices of parameters.
using Buckets = std::vector<std::vector<size_t>>;

// Cuts the parameters `order` into buckets. A bucket has one dtype, and ends with the parameter that reaches its cap. A
// bucket stands before those whose last parameter comes later. DDP cuts parameters of one dtype in the same way.
Buckets cut(const std::vector<Piece>& pieces, const std::vector<size_t>& order, const BucketCaps& caps);

// Notices that gradients arrive in another order than the buckets were cut for.
class ArrivalOrder {
 public:
  // Call after each backward pass with the parameters in the order in which their gradients arrived. `is_cut_for`:
  // whether these buckets are those of that order. Returns whether to cut again: the same order has come often enough
  // in a row. Twice is enough at first, and after each cut it takes twice as often, because an order may alternate.
  template <typename IsCutFor>
  bool note(const std::vector<size_t>& arrival, IsCutFor is_cut_for) {
    if (arrival != last_) {
      last_ = arrival;
      num_in_a_row_ = 1;
      return false;
    }
    if (++num_in_a_row_ != num_needed_ || is_cut_for(arrival)) return false;
    num_needed_ *= 2;
    return true;
  }

 private:
  std::vector<size_t> last_;
  int64_t num_in_a_row_ = 0, num_needed_ = 2;
};

}  // namespace fusedcomm
