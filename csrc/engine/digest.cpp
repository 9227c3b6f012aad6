#include "engine/digest.h"

#include <utility>

#include "codec/crc32c.h"
#include "engine/job.h"

namespace fusedcomm {
namespace {

void add_crc(uint32_t* to, uint32_t next) { *to = crc32c(&next, sizeof(next), *to); }

void add_link(LinkDigest* to, const LinkDigest& next) {
  add_crc(&to->parts, next.parts);
  add_crc(&to->means, next.means);
}

}  // namespace

void Digest::add(const Digest& next) {
  add_crc(&means, next.means);
  for (size_t rank = 0; rank < sent.size(); ++rank) {
    add_link(&sent[rank], next.sent[rank]);
    add_link(&received[rank], next.received[rank]);
  }
}

void Digest::add_messages(int own, uint32_t LinkDigest::* kind, const std::function<uint32_t(int64_t)>& crc_of) {
  for (size_t rank = 0; rank < sent.size(); ++rank) {
    const uint32_t crc = crc_of(static_cast<int64_t>(rank));
    add_crc(&means, crc);
    if (rank != static_cast<size_t>(own)) {
      received[rank].*kind = crc;
      continue;
    }
    for (size_t other = 0; other < sent.size(); ++other) {
      if (other != rank) sent[other].*kind = crc;
    }
  }
}

BucketDigest::BucketDigest(int rank, int world_size, int64_t num_chunks, Done done)
    : rank_(rank),
      world_size_(world_size),
      chunks_(static_cast<size_t>(num_chunks), Digest(world_size)),
      done_(std::move(done)) {}

void BucketDigest::before(const BucketJob& job, const Step& step, int64_t chunk, const std::byte* from) {
  Digest& digest = chunks_[static_cast<size_t>(chunk)];
  const bool is_rows = !job.plan->packed_rows.empty() && !job.plan->gathers, on_one_level = !job.plan->on_two_levels();
  // A step that has a message for each rank, or reads parts of one.
  const auto piece = [&](int64_t rank, int64_t nbytes) { return crc32c(from + rank * nbytes, nbytes); };
  if ((step.operation == Operation::kReduce && on_one_level) || (step.operation == Operation::kSum && is_rows)) {
    const int64_t nbytes = step.operation == Operation::kSum ? step.nbytes : step.nbytes / world_size_;
    for (int64_t rank = 0; rank < world_size_; ++rank) {
      if (is_other(rank)) digest.received[static_cast<size_t>(rank)].parts = piece(rank, nbytes);
    }
  } else if (step.operation == Operation::kSum) {
    digest.add_messages(rank_, &LinkDigest::parts, [&](int64_t rank) { return piece(rank, step.nbytes); });
  } else if (step.operation == Operation::kUnpack && job.plan->encodes_sums() && on_one_level) {
    const int64_t nbytes = step.nbytes / world_size_;
    digest.add_messages(rank_, &LinkDigest::means, [&](int64_t rank) { return piece(rank, nbytes); });
  } else if (step.operation == Operation::kUnpack) {
    digest.means = crc32c(from, step.nbytes);
  }
}

void BucketDigest::after(const BucketJob& job, const Step& step, int64_t chunk, const std::byte* to) {
  // Other sums pack what only an all-reduce or a host sees, or a message of which the sum takes the CRC.
  const bool is_for_ranks = (step.to == Buffer::kOutgoing || step.to == Buffer::kKeptCodes) && !job.plan->gathers;
  if (step.operation != Operation::kPack || !is_for_ranks || job.plan->on_two_levels()) return;
  Digest& digest = chunks_[static_cast<size_t>(chunk)];
  const int64_t nbytes = step.nbytes / world_size_;
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    if (is_other(rank)) digest.sent[static_cast<size_t>(rank)].parts = crc32c(to + rank * nbytes, nbytes);
  }
}

void BucketDigest::add_result(const void* data, int64_t nbytes) {
  uint32_t& means = chunks_.front().means;
  means = crc32c(data, nbytes, means);
}

void BucketDigest::end() {
  Digest all(world_size_);
  for (const Digest& chunk : chunks_) all.add(chunk);
  done_(all);
}

}  // namespace fusedcomm
