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
#include "gradients/pass_weight.h"

namespace fusedcomm {

// A slice list whose address is not known yet.
struct SlicePlaces {
  std::vector<SlicePlace> places;         // in elements from the origin of the gradients
  std::vector<ParameterStatePtr> states;  // the parameter of each; null for a hole

  void append(const SlicePlace& place, const ParameterStatePtr& state) {
    places.push_back(place);
    states.push_back(state);
  }
  void append_hole(int64_t numel) {
    if (numel != 0) append({kHole, numel}, nullptr);
  }
};

// Valid as long as the bucket has the same parameters in the same order.
struct BucketRecord {
  // The gradient of one of the bucket's parameters.
  struct Member {
    ParameterStatePtr state;
    int64_t offset = 0;  // elements from the origin of the gradients for which the tables were made
    int64_t numel = 0;   // elements of the gradients' dtype, in one row: a complex parameter counts twice
    size_t payload = 0;  // index of its layout in the plan
    bool exact = false;  // whether it is one of that layout's exact slices
    int64_t hole = 0;    // elements of the hole before it in its slice list
  };
  // What is kept for one of the plan's layouts.
  struct Kept {
    std::shared_ptr<const BucketTables> tables;         // for pack
    std::shared_ptr<const BucketTables> unpack_tables;  // for unpack, if its layout is not pack's; else null
    std::shared_ptr<ResidualBuffer> residual;           // null if no residual is kept
    // Rows only: the segments of all rows, and those of the own row, counted from it. A reduce-scatter packs all rows
    // and unpacks the own, an all-gather the reverse. Else empty, because the gradients may lie elsewhere in every
    // pass.
    SlicePlaces lossy, exact, own_lossy, own_exact;
  };
  std::vector<c10::TensorImpl*> parameters;
  std::vector<Member> members;
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;             // of all rows
  std::optional<double> factor;  // see Bucket
  bool has_heads = false;        // its messages carry the ranks' weights
  bool is_stale = false;         // its residuals have been replaced, so it must be made again
  bool passthrough = false;      // sparse, or of a dtype that the codec does not carry: summed unencoded
  bool in_one_run = true;
  bool has_rows = false;                  // a reduce-scatter or an all-gather, which plan.gathers tells
  at::ScalarType own_dtype = at::kFloat;  // of this rank's row
  BucketPlan plan;
  std::optional<BucketPlan> again;         // of an all-gather that gathers what `plan`'s have kept, if they keep it
  std::vector<Kept> kept;                  // one for each of the plan's layouts
  std::shared_ptr<KeptMessages> messages;  // null unless the configuration keeps them
  std::shared_ptr<const BucketLabel> label;

  std::vector<std::string> parameter_names() const;
  // Rows only: the layouts of all rows.
  const std::vector<BucketLayout>& layouts_of_rows() const { return plan.gathers ? plan.layouts : plan.encoded_rows; }
};

using BucketRecordPtr = std::shared_ptr<const BucketRecord>;

// The residual of the first encoder with error feedback: a message within a host has none.
inline Residual& first_residual(const BucketRecord& record, Payload* payload) {
  return record.plan.on_two_levels() ? payload->local_reduce : payload->pack;
}

// The label of a bucket, "bucket 3 (first … last; 12 parameters, 1.5 MiB)": the same in plans, statistics, traces,
// errors and warnings. `parameters`: their names. `nbytes`: of their gradients.
std::shared_ptr<const BucketLabel> make_label(size_t index, const std::vector<std::string>& parameters, double nbytes);

// The records of all buckets. Not thread-safe.
class BucketRecords {
 public:
  // device: of the gradients. place: of this rank among hosts.
  BucketRecords(const Engine& engine, const Place& place, c10::Device device)
      : engine_(engine), place_(place), device_(device) {}

  // The record of a bucket that is handed over. If the bucket is new or has changed: plans it, makes its tables, and
  // makes its residuals from those of its parameters; a residual that can no longer be kept is added to the gradients.
  // If its gradients lie elsewhere than in the last two places, makes new tables. weight: null without weights. Throws
  // if the bucket is on another device, or if these are not the gradients of its parameters.
  BucketRecordPtr of(const Bucket& bucket, const PassWeight* weight, Parameters* parameters);

  // By bucket index; null for an index that no bucket has, and for a bucket that has been dropped.
  std::vector<BucketRecordPtr>& all() { return records_; }
  const std::vector<BucketRecordPtr>& all() const { return records_; }
  // Call it when residuals have been replaced: the next hand-over of each bucket makes it a new record.
  void make_stale();

 private:
  const Engine& engine_;
  const Place place_;
  const c10::Device device_;
  std::vector<BucketRecordPtr> records_;
  // The same buckets' records with tables of where the gradients lay before; null if they have not moved. Allocators
  // often give two places in turn.
  std::vector<BucketRecordPtr> others_;
};

// Adds the non-finite elements of a packed chunk to their parameters' counts. It reads the chunk a second time, which
// is affordable because it is rare. gradients: what is packed, of an all-gather this rank's row.
void attribute_nonfinite(const BucketRecord& record, const Gradients& gradients, const BucketJob& job, int64_t chunk);

}  // namespace fusedcomm
