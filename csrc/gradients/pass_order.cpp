#include "gradients/pass_order.h"

#include <c10/util/Exception.h>

#include "engine/stage.h"

namespace fusedcomm {

void PassOrder::take(const Bucket& bucket, const void* record) {
  if (bucket.of_pass()) check(bucket, record);
  if (bucket.ends_pass() || bucket.named_sum()) ++step_;
}

void PassOrder::check(const Bucket& bucket, const void* record) {
  const size_t index = bucket.index;
  // If a reducer skips buckets, passes cannot be told apart here.
  const char* const why =
      ": DDP leaves out buckets that no rank has used, as with skip_all_reduce_unused_params=True, and fusedcomm needs "
      "all of them: make the DDP module without that option. (If a backward pass was interrupted instead, make the DDP "
      "module again.)";
  TORCH_CHECK(index <= next_index_, "fusedcomm: ", bucket_name(index), " was handed over where ",
              bucket_name(next_index_), " was expected", why);
  // In static_graph's first pass all buckets have the index 0 and none is the last: accept one unfinished pass.
  if (index == 0) {
    const bool is_again = next_index_ != 0 && first_of_pass_ == record;
    num_unfinished_ = is_again ? num_unfinished_ + 1 : 0;
    TORCH_CHECK(num_unfinished_ < 2, "fusedcomm: ", bucket_name(0), " was handed over repeatedly, without ",
                bucket_name(next_index_), " and those after it", why);
    first_of_pass_ = record;
  }
  next_index_ = bucket.is_last ? 0 : index + 1;
}

}  // namespace fusedcomm
