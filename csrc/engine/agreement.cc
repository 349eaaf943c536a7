#include "engine/agreement.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace qsgd {
namespace {

constexpr std::chrono::milliseconds kWatch{50};
constexpr std::chrono::milliseconds kGathering{1};

void write_ranks(const RankSet& ranks, Writer& to) {
  const std::vector<int> list = ranks.list();
  write_list(Numbers(list.begin(), list.end()), to);
}

RankSet read_ranks(Reader& from) { return RankSet::of(read_list(from)); }

void write_keys(const std::vector<Key>& keys, Writer& to) {
  for (const auto& [set, name] : keys) {
    to.put(set);
    to.put(name);
  }
}

std::vector<Key> read_keys(Reader& from) {
  std::vector<Key> keys;
  while (!from.done()) {
    const auto set = from.get<int32_t>();
    keys.emplace_back(set, from.text());
  }
  return keys;
}

// Time after which rank 0 reports a tensor that some ranks have not submitted; 0: never.
double stall_s(const Agreement::Config& config) {
  const double warning_s = config.log ? config.stall_warning_s : 0;
  if (warning_s <= 0 || config.stall_shutdown_s <= 0) {
    return std::max(warning_s, config.stall_shutdown_s);
  }
  return std::min(warning_s, config.stall_shutdown_s);
}

// Time after which a relay forwards incomplete operations: before rank 0 can warn of one, it must
// have received a report of it.
Relay::Clock::duration relay_patience(const Agreement::Config& config) {
  constexpr double kMost = 5;
  const double stall = stall_s(config);
  return std::chrono::duration_cast<Relay::Clock::duration>(
      Seconds(stall > 0 ? std::min(stall / 4, kMost) : kMost));
}

size_t book_lines(const Agreement::Config& config) {
  return std::min(config.cache_capacity, kMaxBook);
}

}  // namespace

Agreement::Agreement(Transport& transport, SharedNode* node, Timeline& timeline, Config config,
                     std::function<void(const std::string&)> give_up,
                     std::function<bool()> sums_in_nodes)
    : transport_(transport),
      timeline_(timeline),
      config_(std::move(config)),
      give_up_(std::move(give_up)),
      tree_(transport.rank(), transport.size(), node != nullptr ? &node->nodes() : nullptr,
            config_.fan_out),
      self_(RankSet::one(transport.rank())),
      coordinator_(size(), node, config_.tuning, config_.planning, std::move(sums_in_nodes)),
      relay_(tree_, relay_patience(config_)),
      messenger_(transport, node, tree_,
                 [this](int child, FrameType type, Reader body) { on_message(child, type, body); }),
      sent_(book_lines(config_)),
      received_(tree_.children().size(), ReceivedBook(book_lines(config_), pool_)),
      names_(book_lines(config_)),
      answers_(tree_.children().size()) {}

void Agreement::submit(std::vector<Submission>& submissions) {
  last_submission_ = Coordinator::Clock::now();
  reported_waits_.clear();  // the submissions revoke them on rank 0
  for (Submission& submission : submissions) {
    if (has_children()) submission.operation = pool_->twin(submission.operation);
    receive(self_, std::move(submission));
  }
  if (relay_.has_reports() && may_report()) send_reports();
}

void Agreement::leave(const std::string& reason) {
  left_ = true;
  last_submission_ = Coordinator::Clock::now();
  reported_waits_.clear();
  on_leave(rank(), reason);
}

void Agreement::receive(const RankSet& ranks, Submission submission) {
  note_arrival(ranks, submission);
  if (is_root()) {
    coordinator_.submit(ranks, std::move(submission));
  } else {
    relay_.submit(ranks, std::move(submission));
  }
}

// All ranks of the child's subtree that belong to the process set are ready.
void Agreement::receive_whole(int child, Submission submission) {
  const RankSet& below = tree_.below(static_cast<size_t>(child));
  const int32_t set = submission.operation->set;
  if (set == 0) return receive(below, std::move(submission));
  const Members members = is_root() ? coordinator_.members(set) : relay_.members(set);
  receive(members != nullptr ? below & *members : below, std::move(submission));
}

bool Agreement::make_progress() {
  if (!agreed_.empty() || measures_next_) return true;
  const bool received = messenger_.progress();
  if (is_root()) {
    answer();
  } else {
    relay_.watch();
    if (relay_.has_reports() && may_report()) send_reports();
  }
  return received;
}

// When tensors become ready one after another, a relay merges reports; otherwise its parent would
// get a message per tensor from each child. A report is sent immediately if none is unanswered.
bool Agreement::may_report() const {
  return answered_ || !has_children() ||
         std::chrono::steady_clock::now() - reported_at_ >= kGathering;
}

void Agreement::send_reports() {
  answered_ = false;
  if (has_children()) reported_at_ = std::chrono::steady_clock::now();
  for (const Report& report : relay_.take_reports()) {
    Writer known, items;
    if (!report.whole) {
      write_ranks(report.ranks, known);
      write_ranks(report.ranks, items);
    }
    const size_t head = known.bytes().size();
    sent_.write(report.submissions, known, items);
    const auto kind = [&](FrameType whole, FrameType some) { return report.whole ? whole : some; };
    // Known ones first: new ones may replace their lines in the books.
    if (known.bytes().size() > head) {
      messenger_.send(Messenger::kParent, kind(FrameType::kKnown, FrameType::kSomeKnown),
                      known.bytes());
    }
    if (items.bytes().size() > head) {
      messenger_.send(Messenger::kParent,
                      kind(FrameType::kSubmissions, FrameType::kSomeSubmissions), items.bytes());
    }
  }
}

void Agreement::on_message(int child, FrameType type, Reader body) {
  const auto book = [&]() -> ReceivedBook& { return received_.at(static_cast<size_t>(child)); };
  switch (type) {
    case FrameType::kSubmissions:
      while (!body.done()) receive_whole(child, book().read_item(body));
      return;
    case FrameType::kKnown:
      for (Submission& submission : book().read_known(body)) {
        receive_whole(child, std::move(submission));
      }
      return;
    case FrameType::kSomeSubmissions: {
      const RankSet ranks = read_ranks(body);
      while (!body.done()) receive(ranks, book().read_item(body));
      return;
    }
    case FrameType::kSomeKnown: {
      const RankSet ranks = read_ranks(body);
      for (Submission& submission : book().read_known(body)) receive(ranks, std::move(submission));
      return;
    }
    case FrameType::kLeave: {
      const auto rank = body.get<int32_t>();
      return on_leave(rank, body.text());
    }
    case FrameType::kBlocked: {
      const auto rank = body.get<int32_t>();
      return on_blocked(rank, read_keys(body));
    }
    case FrameType::kResponses:
      return read_responses(body);
    case FrameType::kMeasure:
      return measure_next();
    case FrameType::kQuery: {
      const std::vector<Key> keys = read_keys(body);
      query(keys);
      return relay_.report_unmerged(keys);
    }
    case FrameType::kUnmerged:
      send_to_relays(FrameType::kUnmerged, {});
      return relay_.report_all_unmerged();
    case FrameType::kFarewell:
      return say_farewell();
  }
  throw internal_error("control message of unknown type, from child " + std::to_string(child) +
                       " of rank " + std::to_string(rank()));
}

void Agreement::on_leave(int rank, const std::string& reason) {
  if (is_root()) {
    // Operations that only that rank has not submitted fail, so rank 0 needs every report so far
    // and every later one.
    if (!std::exchange(asked_unmerged_, true)) send_to_relays(FrameType::kUnmerged, {});
    return coordinator_.leave(rank, reason);
  }
  relay_.leave(rank);
  send_reports();
  Writer item;
  item.put(static_cast<int32_t>(rank));
  item.put(reason);
  messenger_.send(Messenger::kParent, FrameType::kLeave, item.bytes(), relay_.all_left());
}

void Agreement::on_blocked(int rank, std::vector<Key> waits_for) {
  if (is_root()) return coordinator_.block(rank, std::move(waits_for));
  relay_.block(rank);
  send_reports();
  Writer items;
  items.put(static_cast<int32_t>(rank));
  write_keys(waits_for, items);
  messenger_.send(Messenger::kParent, FrameType::kBlocked, items.bytes());
}

// Forwards each response to the children whose subtrees take part, before this rank executes any.
void Agreement::read_responses(Reader& body) {
  answered_ = true;
  std::vector<Response> mine;
  while (!body.done()) {
    const char* const begin = body.at();
    Response response = Response::read(body, names_);
    // If the set no longer exists, all ranks get the response.
    const Members members = relay_.members(response.set);
    address(members, begin, static_cast<size_t>(body.at() - begin));
    relay_.note(response);
    if (members == nullptr || members->has(rank())) mine.push_back(std::move(response));
  }
  send_addressed();
  note_agreement(mine);
  std::move(mine.begin(), mine.end(), std::back_inserter(agreed_));
}

// Sends the responses from rank 0 to all ranks, then keeps its own.
void Agreement::answer() {
  std::vector<Response> responses = coordinator_.take_ready();
  for (const std::string& sentence : coordinator_.take_news()) {
    if (config_.log) config_.log(sentence);
  }
  if (!responses.empty()) {
    for (size_t i = 0; size() > 1 && i < responses.size(); ++i) {
      answer_.clear();
      responses[i].write(answer_, names_);
      address(responses[i].recipients, answer_.bytes().data(), answer_.bytes().size());
    }
    send_addressed();
    note_agreement(responses);
    const auto others = [](const Response& r) { return !r.recipients->has(0); };
    std::remove_copy_if(std::make_move_iterator(responses.begin()),
                        std::make_move_iterator(responses.end()), std::back_inserter(agreed_),
                        others);
  }
  if (coordinator_.waits_for_machine() && !measures_next_) measure_next();
  if (coordinator_.all_left() && !coordinator_.waits_for_machine() && !over_) say_farewell();
}

// Appends a response to the message of each child whose subtree contains a recipient. All children
// get responses in the same order, so no two ranks wait for each other.
void Agreement::address(const Members& recipients, const char* bytes, size_t size) {
  for (size_t child = 0; child < answers_.size(); ++child) {
    const bool included = recipients == nullptr || tree_.below(child).meets(*recipients);
    if (included) answers_[child].append(bytes, size);
  }
}

void Agreement::send_addressed() {
  if (answers_.empty()) return;
  for (size_t child = 0; child < answers_.size(); ++child) {
    Writer& theirs = answers_[child];
    if (!theirs.empty()) {
      messenger_.send(static_cast<int>(child), FrameType::kResponses, theirs.bytes());
    }
    theirs.clear();
  }
  // The next operation may use shared memory, and MPI messages make little progress meanwhile.
  messenger_.flush_down();
}

// Ranks without children hold nothing back, and may sleep.
void Agreement::send_to_relays(FrameType type, const std::vector<char>& body) {
  for (size_t child = 0; child < tree_.children().size(); ++child) {
    if (tree_.below(child).count() > 1) messenger_.send(static_cast<int>(child), type, body);
  }
}

void Agreement::send_down(FrameType type, bool last) {
  for (size_t child = 0; child < tree_.children().size(); ++child) {
    messenger_.send(static_cast<int>(child), type, {}, last);
  }
}

void Agreement::measure_next() {
  send_down(FrameType::kMeasure);
  messenger_.flush_down();
  measures_next_ = true;
}

void Agreement::say_farewell() {
  send_down(FrameType::kFarewell, /*last=*/true);
  over_ = true;
}

// Asks the ranks below which of them are ready for these operations.
void Agreement::query(const std::vector<Key>& keys) {
  Writer names;
  write_keys(keys, names);
  send_to_relays(FrameType::kQuery, names.bytes());
}

void Agreement::watch_waits(const Entries& entries, const std::function<bool()>& submits_more) {
  const auto now = Coordinator::Clock::now();
  if (now - last_watch_ < kWatch) return;
  last_watch_ = now;
  if (config_.deadlock_s > 0 && now - last_submission_ > Seconds(config_.deadlock_s)) {
    report_own_waits(entries, submits_more);
  }
  if (!is_root()) return;
  ask_for_late();
  if (config_.stall_warning_s > 0 && config_.log) {
    for (const std::string& sentence : coordinator_.stalled(config_.stall_warning_s)) {
      config_.log(sentence);
    }
  }
  if (config_.stall_shutdown_s <= 0) return;
  const std::string overdue = coordinator_.overdue(config_.stall_shutdown_s);
  if (!overdue.empty()) give_up_(overdue);
}

// Rank 0 needs the reports of all ranks long before it names the missing ones.
void Agreement::ask_for_late() {
  const double stall = stall_s(config_);
  if (stall <= 0 || tree_.children().empty()) return;
  const std::vector<Key> keys = coordinator_.to_ask_for(stall / 2);
  if (!keys.empty()) query(keys);
}

// Reports to rank 0, once, what the program here waits for; a later submission revokes it. A rank
// that submits more without its program, as a GPU finishes a tensor, is not blocked.
void Agreement::report_own_waits(const Entries& entries,
                                 const std::function<bool()>& submits_more) {
  std::vector<Key> keys = entries.waited_for(config_.deadlock_s);
  // Asked after the keys were read: then it sees all that was started before these waits.
  if (keys == reported_waits_ || left_ || submits_more()) return;
  reported_waits_ = keys;
  if (!keys.empty()) on_blocked(rank(), std::move(keys));
}

// If several ranks are reported together, the one that was last is recorded last.
void Agreement::note_arrival(const RankSet& ranks, const Submission& submission) {
  if (!timeline_.on() || (!is_root() && ranks != self_)) return;
  const Operation& o = *submission.operation;
  std::vector<int> order = ranks.list();
  const auto last = std::find(order.begin(), order.end(), submission.last);
  if (last != order.end()) std::rotate(last, last + 1, order.end());
  for (const int rank : order) {
    timeline_.arrived(Timeline::row_of(o.set, o.name), describe(o.kind), rank);
  }
}

void Agreement::note_agreement(const std::vector<Response>& responses) {
  if (!timeline_.on()) return;
  timeline_.cycle();
  for (const Response& response : responses) {
    for (const std::string& name : response.names) {
      timeline_.agreed(Timeline::row_of(response.set, name), response.fault.message);
    }
  }
}

}  // namespace qsgd
