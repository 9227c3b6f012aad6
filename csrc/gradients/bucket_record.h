// What is known of a bucket as it last came: whose gradients it holds, how they will travel, and what stays behind on
// this rank between backward passes.
#pragma once

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "gradients/bucket.h"
#include "gradients/parameters.h"

namespace fusedcomm {

// Valid for as long as the same parameters come in the same order.
struct BucketRecord {
  struct Member {
    ParameterStatePtr state;
    int64_t offset = 0;  // elements from the gradients' origin; of the gradients for which the tables were made
    int64_t numel = 0;   // of the gradients' dtype: a complex parameter counts twice
    size_t payload = 0;  // of the plan's layouts
    bool exact = false;  // in that layout's exact stream
  };
  // Of one of the plan's layouts.
  struct Stream {
    uint32_t first_parameter = 0;
    std::shared_ptr<const BucketTables> tables;         // of what is packed
    std::shared_ptr<const BucketTables> unpack_tables;  // if that is another layout, of what is unpacked
    std::shared_ptr<StreamResidual> residual;           // null without error feedback
  };
  std::vector<c10::TensorImpl*> parameters;
  std::vector<Member> members;
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  bool is_stale = false;  // its residuals have been replaced: to be made anew
  bool foreign = false;   // sparse, or of a dtype the codec does not carry: summed as it is
  bool in_one_run = true;
  BucketPlan plan;
  std::vector<Stream> streams;  // by payload
  std::shared_ptr<const BucketLabel> label;

  // Whether it still tells of this bucket, wherever its gradients lie.
  bool is_of(const Bucket& bucket) const;
  // Whether they lie where its tables say. Without tables it does not matter.
  bool lies_as(const Gradients& gradients) const;
};

// "bucket 3 (first … last; 12 parameters, 1.5 MiB)"
std::shared_ptr<const BucketLabel> make_label(size_t index, const std::vector<BucketRecord::Member>& members,
                                              double nbytes);

// The record of a bucket that is met for the first time, or anew: planned, its tables prepared, its residuals made of
// what its parameters have left out so far; what of that cannot be kept any more is added to the gradients at hand.
// Throws if the bucket is on another device than `device`, or if these are not the gradients of its parameters.
std::shared_ptr<BucketRecord> make_record(const Bucket& bucket, const Engine& engine, const Place& place,
                                          c10::Device device, Parameters* parameters);

// The same record, with tables of where the gradients lie now.
std::shared_ptr<BucketRecord> moved_record(const BucketRecord& record, const Gradients& gradients, Device* device,
                                           Parameters* parameters);

// Which parameters the non-finite elements of a packed chunk belong to. Rare, so it reads the chunk a second time.
void attribute_nonfinite(const BucketRecord& record, const Gradients& gradients, const BucketJob& job, int64_t chunk);

}  // namespace fusedcomm
