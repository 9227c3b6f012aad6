// Compares what the ranks have received. A bit that changes on its way, in a network card or in memory, would make one
// rank's parameters differ from the others' from that step on, and nobody would notice.
//
//   digest    of a pass: the digests of its buckets (engine/digest.h) in their order
//   message   of the next pass: every rank's digest to every rank, ahead of the pass's first bucket. All ranks find the
//             same in it, on the unpack lane, so the pass fails on every rank, before any of its buckets is unpacked
//
// Only for gradients in host memory, and where buckets belong to passes that end: see is_last in bucket.h.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/digest.h"
#include "engine/engine.h"
#include "gradients/bucket.h"
#include "gradients/bucket_future.h"
#include "transport/tensor_transport.h"

namespace fusedcomm {

// What the ranks' digests of some passes, as a rule one, say. It is the same on every rank.
struct DigestComparison {
  // A message that has arrived otherwise than it was sent.
  struct Link {
    int from = 0, to = 0;
    bool of_means = false;  // what `to` received from `from`: means, or parts of gradients
  };
  int64_t first_pass = 0, last_pass = 0;  // numbered from 0 since the synchronizer was made
  std::vector<uint32_t> means;            // by rank: the digest of the means
  // Ranks whose means are not those of most ranks. If no means are those of most: all ranks. Empty if all are equal.
  std::vector<int> outvoted;
  std::vector<Link> links;

  bool agrees() const { return outvoted.empty() && links.empty(); }
  // What to tell the user; not for one that agrees.
  std::string text() const;
};

// Of the ranks' messages, int64 [world_size, …] as PassDigests sends them.
DigestComparison compare_digests(const at::Tensor& of_all, int64_t first_pass, int64_t last_pass);

class PassDigests {
 public:
  // `engine` must outlive this object, but its lanes must end before it does.
  PassDigests(bool is_on, Engine* engine, std::shared_ptr<TensorTransport> transport);

  // The digest of a bucket whose job is about to be submitted; null where none is taken. The first bucket of a pass
  // sends the message.
  std::shared_ptr<BucketDigest> begin_bucket(const Bucket& bucket, const BucketJob& job);
  // Sends the message now, for a checkpoint. The future receives the messages of all ranks, or the error. Null where no
  // digests are taken. A collective call, between passes.
  FuturePtr compare_now();
  // The last comparison; none if there was none.
  std::optional<DigestComparison> last() const;

 private:
  struct Message {
    at::Tensor own;  // int64 [2 + 2 * world_size]
    int64_t first_pass = 0, last_pass = 0;
  };
  // Call it with mutex_ held.
  Message message() const;
  // what: names the message where it is late or lost.
  FuturePtr send(const Message& message, const std::string& what);
  // Call it on the unpack lane.
  void compare(const Message& message, const at::Tensor& of_all);

  const bool is_on_;
  Engine* const engine_;
  const std::shared_ptr<TensorTransport> transport_;

  mutable std::mutex mutex_;  // guards the members below
  bool in_pass_ = false;      // of buckets that are alone
  int64_t num_passes_ = 0, num_submitted_ = 0, num_ended_ = 0;
  // Of the passes from first_pass_ on, which have not been compared.
  int64_t first_pass_ = 0;
  Digest digest_;
  std::optional<DigestComparison> last_;
};

}  // namespace fusedcomm
