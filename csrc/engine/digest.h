// The digest of a bucket: CRCs of bytes that two or more ranks have in common, so that a bit that changes on its way
// from one to the other, or in the memory of one, is noticed when ranks compare their digests
// (gradients/pass_digest.h).
//
//   means   every rank has the same: the messages that are decoded into gradients, or a result that no message has
//   links   rank a has of what it sent to b what b has of what it received from a: parts of gradients, and means
//
//   two-shot         means, links of parts (all-to-all) and of means (all-gather)
//   one-shot         means, links of parts: every rank's message goes to every rank
//   exact, direct    means: the transport adds, and what it sends is not seen here
//   two levels       means
//   reduce-scatter   links of parts: no two ranks have the same means
//
// A CRC is taken on the lane, and at the time, at which the codec writes or reads the bytes, which are then in a cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/sums.h"

namespace fusedcomm {

struct BucketJob;

// CRCs of what one rank sends to another; 0 for what a sum does not send.
struct LinkDigest {
  uint32_t parts = 0;  // of gradients
  uint32_t means = 0;
  bool operator==(const LinkDigest& other) const { return parts == other.parts && means == other.means; }
};

// What digests have in common: of a chunk, of all buckets of a pass.
struct Digest {
  explicit Digest(int world_size) : sent(static_cast<size_t>(world_size)), received(static_cast<size_t>(world_size)) {}
  // Goes on with the digest of what follows. The order counts.
  void add(const Digest& next);
  // Means that are a message of each rank, which has sent it to all others. own: this rank. crc_of: of a rank's
  // message.
  void add_messages(int own, uint32_t LinkDigest::* kind, const std::function<uint32_t(int64_t)>& crc_of);

  uint32_t means = 0;
  // By the other rank. This rank's own are 0.
  std::vector<LinkDigest> sent, received;
};

// The digest of a bucket under way. Several lanes write it, each its own fields of a chunk.
class BucketDigest {
 public:
  // done: called on the unpack lane when the bucket's job has ended, without an error or with one.
  using Done = std::function<void(const Digest&)>;
  BucketDigest(int rank, int world_size, int64_t num_chunks, Done done);

  // The engine calls these around each step of the codec, with the buffers that the step reads and writes.
  void before(const BucketJob& job, const Step& step, int64_t chunk, const std::byte* from);
  void after(const BucketJob& job, const Step& step, int64_t chunk, const std::byte* to);
  // A result that is in no message, or a piece of it.
  void add_result(const void* data, int64_t nbytes);
  // Calls `done` with the digest of all chunks.
  void end();

 private:
  bool is_other(int64_t rank) const { return rank != rank_; }

  const int rank_, world_size_;
  std::vector<Digest> chunks_;
  const Done done_;
};

}  // namespace fusedcomm
