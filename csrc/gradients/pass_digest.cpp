#include "gradients/pass_digest.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace fusedcomm {
namespace {

// The message: how many passes had ended on this rank, all of their buckets included, and 0 if some were still under
// way; the digest of the means; then what was sent to each rank, and what was received from each.
constexpr int64_t kNumPasses = 0, kMeans = 1, kLinks = 2;
// An error names at most this many links.
constexpr size_t kMaxNamedLinks = 8;

int64_t packed(const LinkDigest& link) {
  return static_cast<int64_t>(static_cast<uint64_t>(link.parts) << 32 | link.means);
}
LinkDigest unpacked(int64_t value) {
  const auto bits = static_cast<uint64_t>(value);
  return {static_cast<uint32_t>(bits >> 32), static_cast<uint32_t>(bits)};
}

WireSpan span_of(const at::Tensor& tensor) {
  auto* const data = static_cast<std::byte*>(tensor.mutable_data_ptr());
  return {data, static_cast<int64_t>(tensor.nbytes()), std::make_shared<at::Tensor>(tensor)};
}

// "rank 2", "ranks 0, 1 and 3"
std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

DigestComparison compare_digests(const at::Tensor& of_all, int64_t first_pass, int64_t last_pass) {
  DigestComparison found;
  found.first_pass = first_pass;
  found.last_pass = last_pass;
  const auto rows = of_all.accessor<int64_t, 2>();
  const int world_size = static_cast<int>(of_all.size(0));
  std::map<uint32_t, int> votes;
  for (int rank = 0; rank < world_size; ++rank) {
    found.means.push_back(static_cast<uint32_t>(rows[rank][kMeans]));
    ++votes[found.means.back()];
  }
  int most = 0, num_with_most = 0;
  for (const auto& [digest, num_ranks] : votes) {
    if (num_ranks > most) num_with_most = 0;
    most = std::max(most, num_ranks);
    num_with_most += num_ranks == most;
  }
  for (int rank = 0; rank < world_size && votes.size() > 1; ++rank) {
    if (votes[found.means[static_cast<size_t>(rank)]] < most || num_with_most > 1) found.outvoted.push_back(rank);
  }
  for (int from = 0; from < world_size; ++from) {
    for (int to = 0; to < world_size; ++to) {
      const LinkDigest sent = unpacked(rows[from][kLinks + to]);
      const LinkDigest received = unpacked(rows[to][kLinks + world_size + from]);
      if (sent.parts != received.parts) found.links.push_back({from, to, /*of_means=*/false});
      if (sent.means != received.means) found.links.push_back({from, to, /*of_means=*/true});
    }
  }
  return found;
}

std::string DigestComparison::text() const {
  std::ostringstream text;
  text << "fusedcomm: bits changed on the way between ranks in step " << first_pass;
  if (last_pass != first_pass) text << " to " << last_pass;
  text << " since fusedcomm was attached, the first being 0: ";
  if (!outvoted.empty()) {
    std::map<uint32_t, std::vector<int>> having;
    for (size_t rank = 0; rank < means.size(); ++rank) having[means[rank]].push_back(static_cast<int>(rank));
    std::vector<std::pair<uint32_t, std::vector<int>>> groups(having.begin(), having.end());
    std::sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) {
      return a.second.size() != b.second.size() ? a.second.size() > b.second.size() : a.second < b.second;
    });
    text << (outvoted.size() < means.size() ? ranks_text(outvoted) + " received other means than most ranks"
                                            : "the ranks received different means");
    const char* separator = " (CRC-32C ";
    for (const auto& [digest, ranks] : groups) {
      text << separator << std::hex << digest << std::dec << " on " << ranks_text(ranks);
      separator = ", ";
    }
    text << "), so their parameters differ since then" << (links.empty() ? "" : "; ");
  }
  for (size_t i = 0; i < std::min(links.size(), kMaxNamedLinks); ++i) {
    text << (i == 0 ? "" : ", ") << (links[i].of_means ? "means" : "gradients") << " were damaged from rank "
         << links[i].from << " to rank " << links[i].to;
  }
  if (links.size() > kMaxNamedLinks) text << ", … (" << links.size() << " in all)";
  text << ". Check the memory of these ranks' hosts, and the network cards and cables between them. Then restore a "
          "checkpoint from before that step on all ranks";
  return text.str();
}

PassDigests::PassDigests(bool is_on, Engine* engine, std::shared_ptr<TensorTransport> transport)
    : is_on_(is_on && engine->world_size() > 1),
      engine_(engine),
      transport_(std::move(transport)),
      digest_(engine->world_size()) {}

std::shared_ptr<BucketDigest> PassDigests::begin_bucket(const Bucket& bucket, const BucketJob& job) {
  if (!is_on_) return nullptr;
  std::unique_lock<std::mutex> lock(mutex_);
  const bool begins = bucket.is_alone ? !in_pass_ : bucket.index == 0;
  in_pass_ = !bucket.is_last;
  if (begins && num_passes_ != 0) {
    const Message ahead = message();
    lock.unlock();
    send(ahead, job.label->text);  // a rank that is late with the message is late with the bucket
    lock.lock();
  }
  num_passes_ += begins;
  ++num_submitted_;
  return std::make_shared<BucketDigest>(engine_->rank(), engine_->world_size(), job.num_chunks(),
                                        [this](const Digest& digest) {
                                          std::lock_guard<std::mutex> inner_lock(mutex_);
                                          ++num_ended_;
                                          digest_.add(digest);
                                        });
}

FuturePtr PassDigests::compare_now() {
  if (!is_on_) return nullptr;
  std::unique_lock<std::mutex> lock(mutex_);
  const Message ahead = message();
  lock.unlock();
  return send(ahead, "the ranks' digests");
}

PassDigests::Message PassDigests::message() const {
  const int64_t world_size = engine_->world_size();
  Message message{at::zeros({kLinks + 2 * world_size}, at::kLong), first_pass_, num_passes_ - 1};
  if (num_ended_ != num_submitted_) return message;
  auto* const values = message.own.mutable_data_ptr<int64_t>();
  values[kNumPasses] = num_passes_;
  values[kMeans] = digest_.means;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    values[kLinks + rank] = packed(digest_.sent[static_cast<size_t>(rank)]);
    values[kLinks + world_size + rank] = packed(digest_.received[static_cast<size_t>(rank)]);
  }
  return message;
}

FuturePtr PassDigests::send(const Message& message, const std::string& what) {
  const at::NoGradGuard no_grad;
  const FuturePtr future = make_future(at::kCPU);
  const at::Tensor all = at::empty({engine_->world_size() * message.own.numel()}, at::kLong);
  auto job = std::make_shared<BucketJob>();
  job->counted = false;
  job->label = std::make_shared<const BucketLabel>("digests", what);
  job->on_done = [future, all](std::exception_ptr error) { complete(*future, all, std::move(error)); };
  PassthroughStages stages;
  // Bytes, as buckets are sent: gloo's own all-gather takes longer, and its errors do not name the rank.
  stages.scatter = [transport = transport_, own = span_of(message.own), of_all = span_of(all)](Lane::Completion done) {
    transport->all_gather(Channel::kScatter, own, of_all, std::move(done));
  };
  stages.unpack = [this, message, all] { compare(message, all.view({engine_->world_size(), -1})); };
  engine_->submit_passthrough(std::move(job), std::move(stages));
  return future;
}

void PassDigests::compare(const Message& message, const at::Tensor& of_all) {
  // If a rank still had buckets under way, the next message has their digests, too.
  const auto rows = of_all.accessor<int64_t, 2>();
  for (int64_t rank = 0; rank < of_all.size(0); ++rank) {
    if (rows[rank][kNumPasses] != message.last_pass + 1) return;
  }
  DigestComparison found = compare_digests(of_all, message.first_pass, message.last_pass);
  const bool agrees = found.agrees();
  const std::string text = agrees ? "" : found.text();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    first_pass_ = message.last_pass + 1;
    digest_ = Digest(engine_->world_size());
    last_ = std::move(found);
  }
  if (!agrees) engine_->fail(std::make_exception_ptr(std::runtime_error(text)));
}

std::optional<DigestComparison> PassDigests::last() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

}  // namespace fusedcomm
