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
  out.number<uint32_t>(static_cast<uint32_t>(entries.size()));
  for (const Entry& entry : entries) {
    out.number(entry.id);
    if (entry.id == kNoId) entry.signature.write(out);
  }
  return out.take();
}

Ready Ready::read(Reader& in) {
  Ready of;
  of.set = in.number<int32_t>();
  of.entries.resize(in.number<uint32_t>());
  for (Entry& entry : of.entries) {
    entry.id = in.number<Id>();
    if (entry.id == kNoId) entry.signature = Signature::read(in);
  }
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

std::string text_message(MessageType type, const std::string& text) {
  Writer out;
  out.number(type);
  out.text(text);
  return out.take();
}

}  // namespace fusedcomm::horovod
