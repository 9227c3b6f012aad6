// The training loop's parts for the native tests: buckets whose mean is known, the jobs for them, and functions that
// perform a collective on the bytes of all ranks.
//
// Gradients are small signed integers times a power of two, different on every rank. fp32, bf16 and fp16 therefore give
// the exact mean; int8 is checked against its error bound.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "require.h"

namespace training {

using namespace fusedcomm;

// By bucket: the number of elements, and how many of them are exact. The exact elements come first.
using Shapes = std::vector<std::pair<int64_t, int64_t>>;

struct Bucket {
  Bucket(int64_t numel, int64_t num_exempt) : gradients(static_cast<size_t>(numel)), exact_numel(num_exempt) {}
  std::vector<float> gradients;
  int64_t exact_numel;
};

inline float gradient(int rank, int step, size_t bucket, size_t i) {
  const int value = static_cast<int>((i * 7 + bucket * 5 + static_cast<size_t>(step) * 3) % 15) - 7;
  return static_cast<float>(value * (rank + 1)) * 0.25F;
}

inline void fill(Bucket* bucket, int rank, int step, size_t index) {
  for (size_t i = 0; i < bucket->gradients.size(); ++i) bucket->gradients[i] = gradient(rank, step, index, i);
}

// Returns a text on the first wrong element; empty if all elements are right.
inline std::string find_wrong(const Bucket& bucket, const WireConfig& config, int world_size, int step, size_t index) {
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    double mean = 0, largest = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      mean += gradient(rank, step, index, i) / world_size;
      largest = std::max(largest, 7 * 0.25 * (rank + 1));
    }
    const bool lossy = config.wire == Wire::kInt8 && static_cast<int64_t>(i) >= bucket.exact_numel;
    const double tolerance = lossy ? 2 * largest / 127 : 1e-6;
    if (!(std::fabs(bucket.gradients[i] - mean) <= tolerance)) {
      return "step " + std::to_string(step) + " bucket " + std::to_string(index) + " element " + std::to_string(i) +
             ": " + std::to_string(bucket.gradients[i]) + ", not " + std::to_string(mean);
    }
  }
  return "";
}

// Makes a bucket's job. The caller must still set on_done.
inline std::shared_ptr<BucketJob> make_job(const Engine& engine, const std::shared_ptr<Bucket>& bucket, size_t index,
                                           bool is_last) {
  const auto numel = static_cast<int64_t>(bucket->gradients.size());
  auto job = std::make_shared<BucketJob>();
  job->owner = bucket;
  const ListNumels numels{bucket->exact_numel, {numel - bucket->exact_numel}, numel};
  job->plan = std::make_shared<const BucketPlan>(
      plan_bucket(engine.config(), engine.world_size(), GradDtype::kFloat32, numels));
  Payload payload;
  BucketSlices& slices = payload.slices;
  slices.origin = bucket->gradients.data();
  SliceList& head = job->plan->exact_numel() != 0 ? slices.exact : slices.lossy;
  head.append(bucket->gradients.data(), bucket->exact_numel, GradDtype::kFloat32);
  slices.lossy.append(bucket->gradients.data() + bucket->exact_numel, numel - bucket->exact_numel, GradDtype::kFloat32);
  job->payloads.push_back(std::move(payload));
  const std::string name = "bucket " + std::to_string(index);
  job->label = std::make_shared<const BucketLabel>(name, name + " (" + std::to_string(numel) + " elements)");
  job->is_last = is_last;
  job->grad_nbytes = numel * 4;
  return job;
}

// A rank's place if ranks are assigned to hosts in order: the first `ranks_per_host` ranks are on the first host.
inline Place place_of(int rank, int world_size, int64_t ranks_per_host) {
  return {rank % ranks_per_host, ranks_per_host, rank / ranks_per_host, world_size / ranks_per_host};
}

// The group of ranks that a channel connects this rank with: the group's number, this rank's index in it, its size.
struct Group {
  int64_t id, index, size;
};

inline Group group_of(Channel channel, const Place& place, int rank, int world_size) {
  switch (channel) {
    case Channel::kLocalScatter:
    case Channel::kLocalGather:
      return {place.host, place.local_rank, place.ranks_per_host};
    case Channel::kCrossScatter:
    case Channel::kCrossGather:
      return {place.local_rank, place.host, place.num_hosts};
    default:
      return {0, rank, world_size};
  }
}

// One rank's share of a collective.
struct Part {
  std::byte* send;
  std::byte* receive;  // unused in an all-reduce, whose sum replaces the sent bytes
  int64_t nbytes;      // of `send`
};

inline void move_all_to_all(const std::vector<Part>& parts) {
  const size_t p = parts.size(), nbytes = static_cast<size_t>(parts[0].nbytes) / p;
  for (size_t from = 0; from < p; ++from) {
    for (size_t to = 0; to < p; ++to) {
      std::memcpy(parts[to].receive + from * nbytes, parts[from].send + to * nbytes, nbytes);
    }
  }
}

inline void move_all_gather(const std::vector<Part>& parts) {
  const auto nbytes = static_cast<size_t>(parts[0].nbytes);
  for (size_t from = 0; from < parts.size(); ++from) {
    for (const Part& to : parts) {
      std::byte* const place = to.receive + from * nbytes;
      if (place != parts[from].send) std::memcpy(place, parts[from].send, nbytes);  // equal if it is in place
    }
  }
}

inline void add_all_reduce(const std::vector<Part>& parts) {
  const size_t numel = static_cast<size_t>(parts[0].nbytes) / 4;
  for (size_t i = 0; i < numel; ++i) {
    float sum = 0;
    for (const Part& part : parts) sum += reinterpret_cast<float*>(part.send)[i];
    for (const Part& part : parts) reinterpret_cast<float*>(part.send)[i] = sum;
  }
}

// Adds in bf16. The sums must be exact in bf16, because the low bits are dropped without rounding.
inline void add_all_reduce_bf16(const std::vector<Part>& parts) {
  const size_t numel = static_cast<size_t>(parts[0].nbytes) / 2;
  for (size_t i = 0; i < numel; ++i) {
    float sum = 0;
    for (const Part& part : parts) {
      const uint32_t bits = static_cast<uint32_t>(reinterpret_cast<uint16_t*>(part.send)[i]) << 16;
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      sum += value;
    }
    uint32_t bits;
    std::memcpy(&bits, &sum, sizeof(bits));
    for (const Part& part : parts) reinterpret_cast<uint16_t*>(part.send)[i] = static_cast<uint16_t>(bits >> 16);
  }
}

}  // namespace training
