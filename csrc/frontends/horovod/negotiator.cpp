#include "frontends/horovod/negotiator.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace fusedcomm::horovod {
namespace {

// Operations beyond these get no number, so that a script that makes up a name for each call does not fill the memory.
constexpr size_t kMaxIds = 1 << 16;
constexpr size_t kMaxListed = 8;

}  // namespace

Negotiator::Negotiator(int size, const std::vector<std::vector<int>>& sets, const NegotiatorOptions& options,
                       Mismatch mismatch, Say say)
    : options_(options), mismatch_(std::move(mismatch)), say_(std::move(say)), joined_(static_cast<size_t>(size)) {
  for (const std::vector<int>& ranks : sets) sets_.emplace_back().ranks = ranks;
}

void Negotiator::add(int number, int rank, Entry entry) {
  if (entry.id != kNoId) entry.operation = operation(entry.id);
  if (entry.operation->is_join) return join(rank);
  Set& set = sets_.at(static_cast<size_t>(number));
  const std::string& key = entry.operation->key;
  Pending& pending = set.pending[key];
  if (!pending.first) {
    pending.first = entry.operation;
    pending.first_rank = rank;
    pending.first_rows = entry.rows;
    pending.has.resize(set.ranks.size());
    pending.num_missing = set.ranks.size();
    pending.since = Clock::now();
  }
  if (pending.problem.empty() && !entry.problem.empty()) {
    pending.problem = "fusedcomm: rank " + std::to_string(rank) + " cannot take part: " + entry.problem;
  } else if (pending.problem.empty() && pending.first != entry.operation &&
             pending.first->signature != entry.operation->signature) {
    pending.problem = mismatch_({pending.first->signature, pending.first_rank, pending.first_rows},
                                {entry.operation->signature, rank, entry.rows});
  }
  const auto member = static_cast<size_t>(std::find(set.ranks.begin(), set.ranks.end(), rank) - set.ranks.begin());
  if (member == set.ranks.size() || pending.has[member]) return;
  pending.has[member] = true;
  --pending.num_missing;
  if (!entry.rows.empty()) {
    pending.rows.resize(set.ranks.size());
    pending.rows[member] = std::move(entry.rows);
  }
  if (!entry.part.empty()) {
    pending.parts.resize(set.ranks.size());
    pending.parts[member] = std::move(entry.part);
  }
  look_whether_ready(set, key);
}

void Negotiator::join(int rank) {
  joined_[static_cast<size_t>(rank)] = true;
  for (Set& set : sets_) {
    std::vector<std::string> keys;
    for (const auto& [key, pending] : set.pending) keys.push_back(key);
    for (const std::string& key : keys) look_whether_ready(set, key);
  }
  if (std::find(joined_.begin(), joined_.end(), false) != joined_.end()) return;
  joined_.assign(joined_.size(), false);
  Pending all;
  Operation joins;
  joins.key = "join.noname";
  joins.is_call = joins.has_number = false;
  joins.is_join = true;
  all.first = std::make_shared<const Operation>(joins);
  all.first_rank = rank;
  sets_.front().ready.push_back(std::move(all));
}

void Negotiator::look_whether_ready(Set& set, const std::string& key) {
  Pending& pending = set.pending.at(key);
  if (pending.num_missing != 0) {
    for (size_t i = 0; i < set.ranks.size(); ++i) {
      if (!pending.has[i] && !joined_[static_cast<size_t>(set.ranks[i])]) return;
    }
    if (pending.problem.empty() && !pending.first->may_lack_joined) {
      pending.problem = "fusedcomm: " + key + " needs every rank, and " + missing_text(set, pending) +
                        " joined already. After a join() the other ranks may only call allreduce";
    }
  }
  set.ready_nbytes += pending.first->nbytes;
  set.ready.push_back(std::move(pending));
  set.pending.erase(set.ready.back().first->key);
}

std::string Negotiator::missing_text(const Set& set, const Pending& pending) const {
  std::ostringstream text;
  int count = 0;
  for (size_t i = 0; i < set.ranks.size(); ++i) {
    if (!pending.has[i]) text << (count++ != 0 ? ", " : "") << set.ranks[i];
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
    Response response = response_of(set, std::move(pending));
    const std::string& fuses = response.operation->fuses;
    const int64_t nbytes = response.operation->nbytes;
    if (fuses.empty() || !response.error.empty() || !response.sum.empty()) {
      buckets.emplace_back().push_back(std::move(response));
      continue;
    }
    const auto found = open.find(fuses);
    if (found != open.end() && found->second.nbytes + nbytes <= options_.fusion_nbytes) {
      found->second.nbytes += nbytes;
      buckets[found->second.bucket].push_back(std::move(response));
      continue;
    }
    open[fuses] = {buckets.size(), nbytes};
    buckets.emplace_back().push_back(std::move(response));
  }
  return buckets;
}

Response Negotiator::response_of(Set& set, Pending pending) {
  Response response;
  response.error = std::move(pending.problem);
  response.rows = std::move(pending.rows);
  response.number = pending.first_rank;
  response.operation = std::move(pending.first);
  if (response.error.empty() && !pending.parts.empty()) {
    bool is_small = true;
    for (size_t i = 0; i < pending.has.size(); ++i) is_small = is_small && pending.has[i] == !pending.parts[i].empty();
    if (is_small) response.sum = small_sum(response.operation->reduction, pending.parts);
  }
  if (!response.error.empty() || !response.operation->has_number) return response;
  // A rank that does not know the number yet may have sent the operation first.
  const auto [place, is_new] = set.ids.emplace(response.operation->signature, static_cast<Id>(operations_.size()));
  if (is_new && operations_.size() >= kMaxIds) {
    set.ids.erase(place);
    return response;
  }
  if (is_new) operations_.push_back(response.operation);
  response.id = place->second;
  response.is_new = is_new;
  return response;
}

std::optional<Clock::time_point> Negotiator::next_look() const {
  std::optional<Clock::time_point> next;
  const auto at = [&](Clock::time_point since, double after_s) {
    if (after_s <= 0) return;
    const auto when = since + std::chrono::duration_cast<Clock::duration>(Seconds(after_s));
    next = next ? std::min(*next, when) : when;
  };
  for (const Set& set : sets_) {
    for (const auto& [key, pending] : set.pending) {
      if (!pending.was_reported) at(pending.since, options_.stall_warning_s);
      at(pending.since, options_.stall_shutdown_s);
    }
  }
  return next;
}

std::string Negotiator::look_for_stalls() {
  std::ostringstream fatal;
  const auto now = Clock::now();
  for (Set& set : sets_) {
    std::map<std::string, std::vector<std::string>> late;  // keys by what misses
    for (auto& [key, pending] : set.pending) {
      const double waited_s = Seconds(now - pending.since).count();
      if (options_.stall_warning_s > 0 && waited_s >= options_.stall_warning_s && !pending.was_reported) {
        pending.was_reported = true;
        late[missing_text(set, pending)].push_back(key);
      }
      if (options_.stall_shutdown_s > 0 && waited_s >= options_.stall_shutdown_s && fatal.str().empty()) {
        fatal << "fusedcomm: within HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=" << options_.stall_shutdown_s << " "
              << missing_text(set, pending) << " did not submit " << key;
      }
    }
    for (const auto& [missing, keys] : late) {
      std::ostringstream text;
      text << "fusedcomm: for " << options_.stall_warning_s << " s the other ranks have waited for " << missing
           << ", which did not submit ";
      for (size_t i = 0; i < keys.size() && i < kMaxListed; ++i) text << (i != 0 ? ", " : "") << keys[i];
      if (keys.size() > kMaxListed) text << ", … (" << keys.size() << ")";
      text << ". Every rank must submit the same names; see whether that rank runs, and what it does";
      say_(text.str());
    }
  }
  return fatal.str();
}

}  // namespace fusedcomm::horovod
