#include "engine/response.h"

#include <algorithm>

namespace qsgd {
namespace {

// Optional parts of a response; most have few.
enum Has : uint16_t {
  kError = 1,
  kCoding = 2,
  kSeveralCodings = 4,
  kRows = 8,
  kValue = 16,
  kOperations = 32,
  kGrouped = 64,
  kGroupGoesOn = 128,
  kOnDevice = 256,
};

bool are_equal(const std::vector<CodecSpec>& codings) {
  return std::all_of(codings.begin(), codings.end(),
                     [&](const CodecSpec& coding) { return coding == codings.front(); });
}

uint16_t what_it_has(const Response& r) {
  int has = r.fault ? kError : 0;
  if (!r.codings.empty()) has |= are_equal(r.codings) ? kCoding : kSeveralCodings;
  if (!r.rows.empty()) has |= kRows;
  if (r.value != 0) has |= kValue;
  if (!r.operations.empty()) has |= kOperations;
  if (r.grouped) has |= kGrouped;
  if (r.group_goes_on) has |= kGroupGoesOn;
  if (r.on_device) has |= kOnDevice;
  return static_cast<uint16_t>(has);
}

// Run-length encoded.
void write_codings(const std::vector<CodecSpec>& codings, Writer& to) {
  for (auto run = codings.begin(); run != codings.end();) {
    const auto end =
        std::find_if(run, codings.end(), [&](const CodecSpec& coding) { return coding != *run; });
    to.put(static_cast<uint32_t>(end - run));
    write_spec(*run, to);
    run = end;
  }
}

std::vector<CodecSpec> read_codings(Reader& from, size_t count) {
  std::vector<CodecSpec> codings;
  while (codings.size() < count) {
    const auto run = from.get<uint32_t>();
    codings.insert(codings.end(), run, read_spec(from));
  }
  return codings;
}

}  // namespace

void Response::write(Writer& to, NameBook& book) const {
  const uint16_t has = what_it_has(*this);
  to.put(has);
  to.put(set);
  book.write(set, names, lasting, to);
  to.put(algorithm);
  to.put(segment.log2());
  if (has & kError) {
    to.put(static_cast<uint8_t>(fault.kind));
    to.put(fault.message);
  }
  if (has & kCoding) write_spec(codings.front(), to);
  if (has & kSeveralCodings) write_codings(codings, to);
  if (has & kRows) write_list(rows, to);
  if (has & kValue) to.put(value);
  if (has & kOperations) to.put(static_cast<uint32_t>(operations.size()));
  for (const OperationPtr& operation : operations) qsgd::write(*operation, to);
}

Response Response::read(Reader& from, NameBook& book) {
  Response r;
  const auto has = from.get<uint16_t>();
  r.set = from.get<int32_t>();
  r.names = book.read(r.set, from);
  r.algorithm = from.get<Algorithm>();
  r.segment = SegmentSize::of_log2(from.get<uint8_t>());
  if (has & kError) {
    r.fault.kind = static_cast<ErrorKind>(from.get<uint8_t>());
    r.fault.message = from.text();
  }
  if (has & kCoding) r.codings.assign(r.names.size(), read_spec(from));
  if (has & kSeveralCodings) r.codings = read_codings(from, r.names.size());
  if (has & kRows) r.rows = read_list(from);
  if (has & kValue) r.value = from.get<int64_t>();
  r.grouped = (has & kGrouped) != 0;
  r.group_goes_on = (has & kGroupGoesOn) != 0;
  r.on_device = (has & kOnDevice) != 0;
  const uint32_t operations = has & kOperations ? from.get<uint32_t>() : 0;
  for (uint32_t i = 0; i < operations; ++i) {
    r.operations.push_back(std::make_shared<const Operation>(read_operation(from)));
  }
  return r;
}

}  // namespace qsgd
