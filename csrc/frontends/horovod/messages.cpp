#include "frontends/horovod/messages.h"

namespace fusedcomm::horovod {
namespace {

Writer begun(MessageType type, int32_t set) {
  Writer out;
  out.number(type);
  out.number(set);
  return out;
}

void write(Writer& out, const Response::Entry& entry) {
  out.number(entry.id);
  out.number<uint8_t>(entry.is_new);
  if (entry.is_new) entry.signature.write(out);
  out.number<uint32_t>(static_cast<uint32_t>(entry.of_members.size()));
  for (const auto& list : entry.of_members) out.numbers(list);
}

Response::Entry read_entry(Reader& in) {
  Response::Entry entry;
  entry.id = in.number<Id>();
  entry.is_new = in.number<uint8_t>() != 0;
  if (entry.is_new) entry.signature = Signature::read(in);
  entry.of_members.resize(in.number<uint32_t>());
  for (auto& list : entry.of_members) list = in.numbers<int64_t>();
  return entry;
}

}  // namespace

std::string Ready::message() const {
  Writer out = begun(MessageType::kReady, set);
  out.number(epoch);
  out.number<uint32_t>(static_cast<uint32_t>(entries.size()));
  for (const Entry& entry : entries) {
    out.number(entry.id);
    out.number<uint8_t>(entry.after_wait);
    if (entry.id == kNoId) entry.signature.write(out);
  }
  return out.take();
}

Ready Ready::read(Reader& in) {
  Ready of;
  of.set = in.number<int32_t>();
  of.epoch = in.number<uint32_t>();
  of.entries.resize(in.number<uint32_t>());
  for (Entry& entry : of.entries) {
    entry.id = in.number<Id>();
    entry.after_wait = in.number<uint8_t>() != 0;
    if (entry.id == kNoId) entry.signature = Signature::read(in);
  }
  return of;
}

std::string Deviate::message() const {
  Writer out = begun(MessageType::kDeviate, set);
  out.number(epoch);
  out.numbers(missing);
  return out.take();
}

Deviate Deviate::read(Reader& in) {
  Deviate of;
  of.set = in.number<int32_t>();
  of.epoch = in.number<uint32_t>();
  of.missing = in.numbers<Id>();
  return of;
}

std::string Stopped::message() const {
  Writer out = begun(MessageType::kStopped, set);
  out.number(epoch);
  out.number(num_issued);
  return out.take();
}

Stopped Stopped::read(Reader& in) {
  Stopped of;
  of.set = in.number<int32_t>();
  of.epoch = in.number<uint32_t>();
  of.num_issued = in.number<int64_t>();
  return of;
}

std::string Execute::message() const {
  Writer out = begun(MessageType::kExecute, set);
  out.number<uint32_t>(static_cast<uint32_t>(responses.size()));
  for (const Response& response : responses) {
    out.text(response.error);
    out.number(response.number);
    out.number<uint32_t>(static_cast<uint32_t>(response.entries.size()));
    for (const Response::Entry& entry : response.entries) write(out, entry);
  }
  return out.take();
}

Execute Execute::read(Reader& in) {
  Execute of;
  of.set = in.number<int32_t>();
  of.responses.resize(in.number<uint32_t>());
  for (Response& response : of.responses) {
    response.error = in.text();
    response.number = in.number<int32_t>();
    const auto num_entries = in.number<uint32_t>();
    for (uint32_t i = 0; i < num_entries; ++i) response.entries.push_back(read_entry(in));
  }
  return of;
}

std::string Plan::message() const {
  Writer out = begun(MessageType::kPlan, set);
  out.number(epoch);
  out.number<uint32_t>(static_cast<uint32_t>(buckets.size()));
  for (const auto& bucket : buckets) out.numbers(bucket);
  return out.take();
}

Plan Plan::read(Reader& in) {
  Plan of;
  of.set = in.number<int32_t>();
  of.epoch = in.number<uint32_t>();
  of.buckets.resize(in.number<uint32_t>());
  for (auto& bucket : of.buckets) bucket = in.numbers<Id>();
  return of;
}

std::string Stop::message() const {
  Writer out = begun(MessageType::kStop, set);
  out.number(epoch);
  return out.take();
}

Stop Stop::read(Reader& in) {
  Stop of;
  of.set = in.number<int32_t>();
  of.epoch = in.number<uint32_t>();
  return of;
}

std::string Resume::message() const {
  Writer out = begun(MessageType::kResume, set);
  out.number(epoch);
  out.number(num_valid);
  out.number(num_entered);
  return out.take();
}

Resume Resume::read(Reader& in) {
  Resume of;
  of.set = in.number<int32_t>();
  of.epoch = in.number<uint32_t>();
  of.num_valid = in.number<int64_t>();
  of.num_entered = in.number<int64_t>();
  return of;
}

std::string text_message(MessageType type, const std::string& text) {
  Writer out;
  out.number(type);
  out.text(text);
  return out.take();
}

}  // namespace fusedcomm::horovod
