#include "frontends/horovod/bucket_tuner.h"

#include <algorithm>
#include <fstream>

namespace fusedcomm::horovod {
namespace {

constexpr int64_t kMib = 1 << 20;

}  // namespace

BucketTuner::BucketTuner(const TuningOptions& options, int64_t first)
    : options_(options),
      sizes_{first},
      num_to_skip_(options.warmup_samples * options.steps_per_sample),
      is_searching_(options.is_on) {
  for (const int64_t size : {1 * kMib, 4 * kMib, 16 * kMib, 64 * kMib}) {
    if (size != first) sizes_.push_back(size);
  }
}

bool BucketTuner::note_cycle(double seconds) {
  if (!is_searching_) return false;
  if (num_to_skip_ > 0) {
    --num_to_skip_;
    return false;
  }
  cycles_.push_back(seconds);
  // The first cycle after a change still has buckets of the size before.
  if (static_cast<int64_t>(cycles_.size()) <= options_.steps_per_sample) return false;
  std::vector<double> measured(cycles_.begin() + 1, cycles_.end());
  std::nth_element(measured.begin(), measured.begin() + static_cast<int64_t>(measured.size() / 2), measured.end());
  medians_.push_back(measured[measured.size() / 2]);
  cycles_.clear();
  const size_t before = current_;
  if (medians_.size() < sizes_.size()) {
    ++current_;
  } else {
    is_searching_ = false;
    const auto best = std::min_element(medians_.begin(), medians_.end());
    current_ = static_cast<size_t>(best - medians_.begin());
    write_log();
  }
  return current_ != before;
}

void BucketTuner::write_log() const {
  if (options_.log.empty()) return;
  std::ofstream file(options_.log);
  file << "fusion_threshold_bytes,median_seconds,kept\n";
  for (size_t i = 0; i < medians_.size(); ++i) {
    file << sizes_[i] << "," << medians_[i] << "," << (i == current_ ? 1 : 0) << "\n";
  }
}

}  // namespace fusedcomm::horovod
