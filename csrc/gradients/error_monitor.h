// Watches what the wire does to gradients: measures what buckets lose when they are packed, compares results with exact
// sums, and says which buckets lose too much.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "gradients/bucket.h"
#include "transport/c10d_transport.h"

namespace fusedcomm {

struct GuardOptions {
  int64_t verify_every = 0;   // steps; 0: never
  int64_t measure_every = 0;  // steps; 0: never
  double fallback_error = 0;  // relative error of a verified bucket beyond which it falls back; 0: never
};

// A bucket's result beside an exact all-reduce of the same gradients.
struct Verification {
  int64_t step = 0;
  std::shared_ptr<const BucketLabel> label;
  // float64 [3], on the gradients' device: ‖result − exact‖₂², ‖exact‖₂², and how many elements of the result are not
  // finite though they should be, or finite though they should not. Where the exact mean has elements that are not
  // finite, others of the result may be so, too: a scale takes its block along.
  at::Tensor norms;
};

// What this rank's pack of a bucket left out.
struct Measurement {
  int64_t step = 0;
  at::Tensor error_norm, norm;  // float64 scalars: ‖gradient − what was sent for it‖₂, ‖gradient‖₂
};

struct BucketRecord;

class Guard {
 public:
  // Neither is kept alive; the engine's lanes must have ended before the guard does.
  Guard(const GuardOptions& options, Engine* engine, C10dTransport* transport);

  // Whether anything is ever verified: if not, begin_pass() and take_notice() find nothing.
  bool verifies() const { return options_.verify_every != 0; }
  // Whether it is this bucket's turn. `num_buckets`: of the step before.
  bool is_verified(int64_t pass, size_t index, size_t num_buckets) const {
    const int64_t every = options_.verify_every;
    return every != 0 && pass % every == 0 && index == static_cast<size_t>(pass / every) % num_buckets;
  }
  // Submits the job with an exact sum of the same gradients behind it, which on_done waits for, too.
  void submit_verified(std::shared_ptr<BucketJob> job, const GradientsPtr& gradients, int64_t pass,
                       std::shared_ptr<const BucketRecord> record);

  // Whether buckets of this pass are to be measured.
  bool is_measured(int64_t pass) const {
    const int64_t every = options_.measure_every;
    return every != 0 && pass % every == std::min(kFirstMeasured, every - 1);
  }
  // What came out for a bucket that was measured.
  void add(const std::string& bucket, Measurement measurement);
  // The bucket of this name is another one now.
  void forget(const std::string& bucket);

  // A bucket that lost too much, on every rank alike.
  struct Failing {
    std::shared_ptr<const BucketRecord> record;
    int64_t pass;
    double relative_error;  // Inf if the result is not finite where the exact mean is, or the other way round
  };
  // Once at the beginning of each backward pass, before its first bucket is submitted. What is found in one pass is
  // told to the other ranks in the next, and returned in the one after: a decision must not depend on who was first.
  std::vector<Failing> begin_pass(int64_t pass);
  // What is to be said to the user of results that are not finite where the exact mean is, or the other way round, in
  // passes before this one: of the first only. Empty if there is nothing. Waits for the device.
  std::string take_notice(int64_t pass);

  // The last of them, oldest first.
  std::vector<Verification> verifications() const;
  std::map<std::string, Measurement> measurements() const;

 private:
  struct Pending {
    Verification verification;
    std::shared_ptr<const BucketRecord> record;
    at::Tensor shared;  // the sum of all ranks' norms, once it has been asked for
  };

  // Not one of the first passes, after which DDP cuts its buckets anew.
  static constexpr int64_t kFirstMeasured = 2;

  void share(Pending* pending);

  const GuardOptions options_;
  Engine* const engine_;
  C10dTransport* const transport_;
  mutable std::mutex mutex_;
  std::deque<Verification> verifications_;
  std::map<std::string, Measurement> measurements_;
  std::deque<Pending> pending_;  // only where there is a fallback
  // Those that take_notice() has not looked at yet; none once it has said something.
  std::deque<Verification> unseen_;
  bool has_said_ = false;
};

}  // namespace fusedcomm
