// Monitors the error that the wire causes: says which buckets are measured (measured_bucket.h) and verified
// (verified_bucket.h), keeps the results, and reports buckets whose error is too large.
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
#include "transport/tensor_transport.h"

namespace fusedcomm {

struct ErrorMonitorOptions {
  int64_t verify_every = 0;        // steps from one verified bucket to the next; 0: never
  int64_t measure_every = 0;       // steps from one measured step to the next; 0: never
  double fallback_error = 0;       // relative error of a verified bucket above which the bucket falls back; 0: never
  int fallback_wire = kExactWire;  // wire number that the parameters of such a bucket get
  bool digest = false;             // whether ranks compare what they have received; on a CPU only

  // Calls visit(name, pointer to member) for each field, by its name in Config.native_checks() of
  // fusedcomm/config/config.py.
  template <class Visit>
  static void visit_fields(Visit visit) {
    visit("verify_every", &ErrorMonitorOptions::verify_every);
    visit("measure_every", &ErrorMonitorOptions::measure_every);
    visit("fallback_error", &ErrorMonitorOptions::fallback_error);
    visit("fallback_wire", &ErrorMonitorOptions::fallback_wire);
    visit("digest", &ErrorMonitorOptions::digest);
  }
};

// A bucket's result beside an exact all-reduce of the same gradients.
struct Verification {
  int64_t step = 0;
  std::shared_ptr<const BucketLabel> label;
  // float64 [3], on the gradients' device: ‖result − exact‖₂², ‖exact‖₂², and the number of wrong elements. An element
  // of the result is wrong if it is not finite though it should be, or finite though it should not be. If the exact
  // mean has non-finite elements, only the second kind counts, because a block's scale makes the block's other elements
  // non-finite, too.
  at::Tensor norms;
};

// The error of this rank's first encoder for one bucket.
struct Measurement {
  int64_t step = 0;
  std::shared_ptr<const BucketLabel> label;
  at::Tensor error_norm, norm;  // float64 scalars: ‖gradient − what was sent for it‖₂ and ‖gradient‖₂
};

struct BucketRecord;
using BucketRecordPtr = std::shared_ptr<const BucketRecord>;

class ErrorMonitor {
 public:
  // The monitor keeps neither the engine nor the transport alive. The engine's lanes must end before the monitor does.
  ErrorMonitor(const ErrorMonitorOptions& options, Engine* engine, TensorTransport* transport);

  // Whether any bucket is ever verified. If not, begin_pass() and take_notice() return nothing.
  bool verifies() const { return options_.verify_every != 0; }
  // Whether bucket `index` is verified in this pass: buckets take turns. num_buckets: in the pass before.
  bool is_verified(int64_t pass, size_t index, size_t num_buckets) const {
    const int64_t every = options_.verify_every;
    return every != 0 && pass % every == 0 && index == static_cast<size_t>(pass / every) % num_buckets;
  }
  // Call it before a bucket of this pass is verified, and add() when it has been.
  void expect(const Verification& verification, const BucketRecordPtr& record);
  void add(const Verification& verification);

  // Whether buckets of this pass are measured.
  bool is_measured(int64_t pass) const {
    const int64_t every = options_.measure_every;
    return every != 0 && pass % every == std::min(kFirstMeasured, every - 1);
  }
  // Stores the measurement of a bucket.
  void add(Measurement measurement);
  // Drops a bucket's measurement. Call it when another bucket has this name.
  void forget(const std::string& bucket);

  // A bucket whose error is too large. Every rank finds the same.
  struct Failing {
    BucketRecordPtr record;
    int64_t pass;
    double relative_error;  // ‖result − exact‖₂ / ‖exact‖₂; Inf if elements of the result are wrong
  };
  // Call it once at the beginning of each backward pass, before its first bucket is submitted. Errors of one pass are
  // summed over the ranks in the next pass and returned in the one after: all ranks must decide in the same pass.
  std::vector<Failing> begin_pass(int64_t pass);
  // A warning for the user about wrong elements in a bucket of an earlier pass; empty if there is nothing to report.
  // Only the first such bucket is ever reported. Waits for the device.
  std::string take_notice(int64_t pass);

  // The last verifications, oldest first; at most 256.
  std::vector<Verification> verifications() const;
  // The last measurement of each bucket, by the bucket's name.
  std::map<std::string, Measurement> measurements() const;

 private:
  struct Pending {
    Verification verification;
    BucketRecordPtr record;
    at::Tensor shared;  // the sum of all ranks' norms; undefined before share()
  };

  // The first pass that may be measured. It is not one of the first passes, after which DDP rebuilds its buckets.
  static constexpr int64_t kFirstMeasured = 2;

  // Submits the sum of the norms over the ranks.
  void share(Pending* pending);

  const ErrorMonitorOptions options_;
  Engine* const engine_;
  TensorTransport* const transport_;
  mutable std::mutex mutex_;
  std::deque<Verification> verifications_;
  std::map<std::string, Measurement> measurements_;
  std::deque<Pending> pending_;  // empty unless there is a fallback
  // Verifications that take_notice() has not checked yet; empty once it has returned a warning.
  std::deque<Verification> unseen_;
  bool has_said_ = false;  // whether take_notice() has returned a warning
};

}  // namespace fusedcomm
