#include "frontends/horovod/negotiator.h"

#include <algorithm>
#include <sstream>
#include <unordered_map>
#include <utility>

namespace fusedcomm::horovod {
namespace {

constexpr size_t kMaxListed = 8;

// The reduction of the members' parts, in their order. Ranks that have joined have none. Undefined unless every other
// member has sent its part.
at::Tensor small_sum(const std::vector<Entry>& entries) {
  const at::NoGradGuard no_grad;
  at::Tensor sum;
  for (const Entry& entry : entries) {
    if (!entry.operation) continue;
    if (!entry.part.defined()) return {};
    const Op op = entry.operation->op;
    if (!sum.defined()) {
      sum = entry.part.clone();
    } else if (op == Op::kMin || op == Op::kMax) {
      sum = op == Op::kMin ? at::minimum(sum, entry.part) : at::maximum(sum, entry.part);
    } else {
      op == Op::kProduct ? sum.mul_(entry.part) : sum.add_(entry.part);
    }
  }
  return sum;
}

}  // namespace

Negotiator::Negotiator(int size, const std::vector<std::vector<int>>& sets, const NegotiatorOptions& options,
                       Mismatch mismatch, Say say)
    : options_(options), mismatch_(std::move(mismatch)), say_(std::move(say)), joined_(static_cast<size_t>(size)) {
  for (const std::vector<int>& ranks : sets) sets_.emplace_back().ranks = ranks;
}

void Negotiator::add(int number, int rank, Entry entry) {
  Set& set = sets_.at(static_cast<size_t>(number));
  const auto member = static_cast<size_t>(std::find(set.ranks.begin(), set.ranks.end(), rank) - set.ranks.begin());
  const OperationPtr operation = entry.operation;
  Pending& pending = set.pending[operation->key];
  if (pending.entries.empty()) {
    pending.entries.resize(set.ranks.size());
    pending.num_missing = set.ranks.size();
    pending.first = member;
  }
  if (pending.entries.at(member).operation) return;
  if (pending.problem.empty() && !entry.problem.empty()) {
    pending.problem = "fusedcomm: rank " + std::to_string(rank) + " cannot take part: " + entry.problem;
  }
  if (entry.problem.empty() && !std::exchange(pending.is_awaited, true)) {
    pending.since = Clock::now();
    pending.was_reported = false;
  }
  pending.entries[member] = std::move(entry);
  if (pending.problem.empty() && pending.operation().signature != operation->signature) {
    const auto said = [&](size_t of) -> Said {
      return {pending.entries[of].operation->signature, set.ranks[of], pending.entries[of].rows};
    };
    pending.problem = mismatch_(said(pending.first), said(member));
  }
  --pending.num_missing;
  pending.last_rank = rank;
  if (operation->is_join) {
    joined_[static_cast<size_t>(rank)] = true;
    for (Set& each : sets_) {
      std::vector<std::string> keys;
      for (const auto& [key, waiting] : each.pending) {
        if (!waiting.operation().is_join) keys.push_back(key);
      }
      for (const std::string& key : keys) look_whether_ready(each, key);
    }
  }
  look_whether_ready(set, operation->key);
}

void Negotiator::look_whether_ready(Set& set, const std::string& key) {
  Pending& pending = set.pending.at(key);
  const Operation& operation = pending.operation();
  if (pending.num_missing != 0) {
    for (size_t i = 0; i < set.ranks.size(); ++i) {
      const bool has_joined = joined_[static_cast<size_t>(set.ranks[i])] && !operation.is_join;
      if (!pending.entries[i].operation && !has_joined) return;
    }
    if (pending.problem.empty() && !operation.may_lack_joined) {
      pending.problem = "fusedcomm: " + key + " needs every rank, and " + missing_text(set, pending) +
                        " joined already. After a join() the other ranks may only call allreduce";
    }
  }
  if (operation.is_join) joined_.assign(joined_.size(), false);
  set.ready_nbytes += operation.nbytes;
  set.ready.push_back(std::move(pending));
  set.pending.erase(key);
}

std::string Negotiator::missing_text(const Set& set, const Pending& pending) {
  std::ostringstream text;
  int count = 0;
  for (size_t i = 0; i < set.ranks.size(); ++i) {
    if (!pending.entries[i].operation) text << (count++ != 0 ? ", " : "") << set.ranks[i];
  }
  return (count == 1 ? "rank " : "ranks ") + text.str();
}

bool Negotiator::is_due(int number, bool is_busy) const {
  const Set& set = sets_.at(static_cast<size_t>(number));
  return !set.ready.empty() && (!is_busy || set.ready_nbytes >= options_.fusion_nbytes);
}

Buckets Negotiator::take(int number) {
  Set& set = sets_.at(static_cast<size_t>(number));
  Buckets buckets;
  struct Open {
    size_t bucket;
    int64_t nbytes;
  };
  std::unordered_map<std::string, Open> open;  // by what fuses
  set.ready_nbytes = 0;
  for (Pending& pending : std::exchange(set.ready, {})) {
    Response response = response_of(std::move(pending));
    const std::string& fuses = response.operation->fuses;
    const int64_t nbytes = response.operation->nbytes;
    const bool is_alone = fuses.empty() || !response.error.empty() || response.sum.defined();
    const auto found = is_alone ? open.end() : open.find(fuses);
    if (found != open.end() && found->second.nbytes + nbytes <= options_.fusion_nbytes) {
      found->second.nbytes += nbytes;
      buckets[found->second.bucket].push_back(std::move(response));
      continue;
    }
    if (!is_alone) open[fuses] = {buckets.size(), nbytes};
    buckets.emplace_back().push_back(std::move(response));
  }
  return buckets;
}

Response Negotiator::response_of(Pending pending) {
  Response response;
  response.operation = pending.entries[pending.first].operation;
  response.error = std::move(pending.problem);
  response.number = pending.last_rank;
  if (!response.error.empty()) return response;
  response.sum = small_sum(pending.entries);
  if (pending.entries[pending.first].rows.empty()) return response;
  for (Entry& entry : pending.entries) response.rows.push_back(std::move(entry.rows));
  return response;
}

Negotiator::Stalls Negotiator::look_for_stalls() {
  Stalls found;
  const auto now = Clock::now();
  for (Set& set : sets_) {
    std::map<std::string, std::vector<std::string>> late;  // keys by what misses
    for (auto& [key, pending] : set.pending) {
      if (pending.operation().is_join) continue;  // the others have more batches
      // Whether it has waited so long. 0: for ever.
      const auto has_waited = [&, since = pending.since](double time_s) {
        if (time_s <= 0) return false;
        const auto when = since + std::chrono::duration_cast<Clock::duration>(Seconds(time_s));
        if (now < when) found.next = found.next ? std::min(*found.next, when) : when;
        return now >= when;
      };
      if (!pending.was_reported && has_waited(options_.stall_warning_s)) {
        pending.was_reported = true;
        late[missing_text(set, pending)].push_back(key);
      }
      // What is refused everywhere so far keeps nobody: a rank may have made its mistaken call alone, and gone on.
      if (pending.is_awaited && has_waited(options_.stall_shutdown_s) && found.fatal.empty()) {
        std::ostringstream text;
        text << "fusedcomm: within HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=" << options_.stall_shutdown_s << " "
             << missing_text(set, pending) << " did not submit " << key;
        found.fatal = text.str();
      }
    }
    for (const auto& [missing, keys] : late) warn(missing, keys);
  }
  return found;
}

void Negotiator::warn(const std::string& missing, const std::vector<std::string>& keys) const {
  std::ostringstream text;
  text << "fusedcomm: for " << options_.stall_warning_s << " s the other ranks have waited for " << missing
       << ", which did not submit ";
  for (size_t i = 0; i < keys.size() && i < kMaxListed; ++i) text << (i != 0 ? ", " : "") << keys[i];
  if (keys.size() > kMaxListed) text << ", … (" << keys.size() << ")";
  text << ". Every rank must submit the same names; see whether that rank runs, and what it does";
  say_(text.str());
}

}  // namespace fusedcomm::horovod
