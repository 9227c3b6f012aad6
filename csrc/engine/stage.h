// The stages of a bucket, and the bucket's names in traces, on the board and in errors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace fusedcomm {

// Stages called "local" are within a host, in sums on two levels. kBucket and kExposed are only spans of a trace
// (trace.h).
enum class Stage : uint8_t {
  kPack,
  kLocalAllToAll,
  kLocalReduce,
  kAllToAll,
  kReduce,
  kAllGather,
  kLocalAllGather,
  kAllReduce,
  kUnpack,
  kBucket,
  kExposed
};
inline constexpr int kNumStages = 11;

inline const char* stage_name(Stage stage) {
  constexpr std::array<const char*, kNumStages> kNames = {
      "pack",       "local all-to-all", "local reduce", "all-to-all", "reduce", "all-gather", "local all-gather",
      "all-reduce", "unpack",           "bucket",       "exposed"};
  return kNames[static_cast<size_t>(stage)];
}

// Whether the stage is a collective.
inline bool is_on_wire(Stage stage) {
  switch (stage) {
    case Stage::kLocalAllToAll:
    case Stage::kAllToAll:
    case Stage::kAllGather:
    case Stage::kLocalAllGather:
    case Stage::kAllReduce:
      return true;
    default:
      return false;
  }
}

// "bucket 3": how every text, trace and statistic spells a bucket. A whole label begins with it; see make_label().
inline std::string bucket_name(size_t index) { return "bucket " + std::to_string(index); }

// The names of a bucket.
struct BucketLabel {
  BucketLabel(std::string bucket_name, std::string bucket_text)
      : name(std::move(bucket_name)), text(std::move(bucket_text)) {
    for (int stage = 0; stage < kNumStages; ++stage) {
      ranges[static_cast<size_t>(stage)] = "fusedcomm/" + name + "/" + stage_name(static_cast<Stage>(stage));
    }
  }
  std::string name;                            // "bucket 3"
  std::string text;                            // the name with its parameters and size: the bucket's label
  std::array<std::string, kNumStages> ranges;  // a name for each stage, for profilers
};

}  // namespace fusedcomm
