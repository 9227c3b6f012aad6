// The record of a bucket as it was last handed over: its parameters, its plan, and the tables and residuals that this
// rank keeps for it between backward passes.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "gradients/bucket.h"
#include "gradients/parameters.h"

namespace fusedcomm {

// Valid as long as the bucket has the same parameters in the same order.
struct BucketRecord {
  // The gradient of one of the bucket's parameters.
  struct Member {
    ParameterStatePtr state;
    int64_t offset = 0;  // elements from the origin of the gradients for which the tables were made
    int64_t numel = 0;   // elements of the gradients' dtype: a complex parameter counts twice
    size_t payload = 0;  // index of its layout in the plan
    bool exact = false;  // whether it is in that layout's exact stream
  };
  // What is kept for one of the plan's layouts.
  struct Payload {
    // The number of the layout's first lossy parameter. It selects the noise of stochastic rounding.
    uint32_t first_parameter = 0;
    std::shared_ptr<const BucketTables> tables;         // for pack
    std::shared_ptr<const BucketTables> unpack_tables;  // for unpack, if its layout is not pack's; else null
    std::shared_ptr<ResidualBuffer> residual;           // null if no residual is kept
  };
  std::vector<c10::TensorImpl*> parameters;
  std::vector<Member> members;
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  std::optional<double> factor;  // see Bucket
  bool is_stale = false;         // its residuals have been replaced, so it must be made again
  bool passthrough = false;      // sparse, or of a dtype that the codec does not carry: summed unencoded
  bool in_one_run = true;
  BucketPlan plan;
  std::vector<Payload> streams;  // one for each of the plan's layouts
  std::shared_ptr<const BucketLabel> label;

  std::vector<std::string> parameter_names() const;
  // Whether the record is still valid for this bucket, wherever its gradients lie.
  bool is_of(const Bucket& bucket) const;
  // Whether the gradients lie where the tables say. True if there are no tables.
  bool lies_as(const Gradients& gradients) const;
  // Whether the residuals of its parameters are still in this record, and not in that of another bucket.
  bool has_residuals() const;
};

// The first encoder with error feedback and noise: a message within a host has neither.
inline Encoding& first_encoding(const BucketRecord& record, Payload* payload) {
  return record.plan.on_two_levels() ? payload->local_reduce : payload->pack;
}

// The label of a bucket, "bucket 3 (first … last; 12 parameters, 1.5 MiB)": the same in plans, statistics, traces,
// errors and warnings. `parameters`: their names. `nbytes`: of their gradients.
std::shared_ptr<const BucketLabel> make_label(size_t index, const std::vector<std::string>& parameters, double nbytes);

// Makes the record of a bucket that is new or has changed: plans it, makes its tables, and makes its residuals from
// those of its parameters. A residual that can no longer be kept is added to the gradients. Throws if the bucket is
// on another device than `device`, or if these are not the gradients of its parameters.
std::shared_ptr<BucketRecord> make_record(const Bucket& bucket, const Engine& engine, const Place& place,
                                          c10::Device device, Parameters* parameters);

// A copy of the record, with tables of where the gradients lie now.
std::shared_ptr<BucketRecord> moved_record(const BucketRecord& record, const Gradients& gradients, Device* device,
                                           Parameters* parameters);

// Adds the non-finite elements of a packed chunk to their parameters' counts. It reads the chunk a second time, which
// is affordable because it is rare.
void attribute_nonfinite(const BucketRecord& record, const Gradients& gradients, const BucketJob& job, int64_t chunk);

}  // namespace fusedcomm
