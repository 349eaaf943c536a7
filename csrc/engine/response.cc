#include "engine/response.h"

namespace qsgd {

void Response::write(Writer& to, NameBook& book) const {
  to.put(set);
  to.put(static_cast<uint8_t>(error));
  to.put(message);
  book.write(set, names, lasting, to);
  write_coding(coding, to);
  to.put(algorithm);
  write_list(rows, to);
  to.put(value);
  to.put(static_cast<uint8_t>(grouped));
  to.put(static_cast<uint8_t>(group_goes_on));
  to.put(static_cast<uint32_t>(facts.size()));
  for (const Submission& submission : facts) submission.write(to);
}

Response Response::read(Reader& from, NameBook& book) {
  Response r;
  r.set = from.get<int32_t>();
  r.error = static_cast<ErrorKind>(from.get<uint8_t>());
  r.message = from.text();
  r.names = book.read(r.set, from);
  r.coding = read_coding(from);
  r.algorithm = from.get<Algorithm>();
  r.rows = read_list(from);
  r.value = from.get<int64_t>();
  r.grouped = from.get<uint8_t>() != 0;
  r.group_goes_on = from.get<uint8_t>() != 0;
  const auto facts = from.get<uint32_t>();
  for (uint32_t i = 0; i < facts; ++i) r.facts.push_back(Submission::read(from));
  return r;
}

}  // namespace qsgd
