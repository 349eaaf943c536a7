// Simulates rounds of messages on a network and prints the seconds of each round.
//
//   simulator < input > output
//
// The first line of the input is the platform, with bandwidths in bytes/s of one link:
//   crossbar HOSTS BANDWIDTH
//   dragonfly GROUPS GLOBAL_LINKS ROUTERS LOCAL_LINKS HOSTS_PER_ROUTER BANDWIDTH
//   fat_tree LEAVES HOSTS_PER_LEAF UPLINKS CABLES BANDWIDTH
// Then, for every round, the number of its messages and a line "FROM TO BYTES" for each. All
// messages of a round start together; the round ends with the last of them. Links have no latency
// here: the caller adds the latency of messages.
#include <cstdio>
#include <simgrid/s4u.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace s4u = simgrid::s4u;

namespace {

struct Message {
  unsigned from, to;
  double bytes;
};
using Round = std::vector<Message>;

template <class T>
T read(const char* format, const char* what) {
  T value;
  if (std::scanf(format, &value) != 1) throw std::runtime_error(std::string("input: no ") + what);
  return value;
}
unsigned read_count(const char* what) { return read<unsigned>("%u", what); }

std::vector<s4u::Host*> hosts;

// Stores hosts by their number in the topology, because Engine::get_all_hosts has another order.
std::pair<simgrid::kernel::routing::NetPoint*, simgrid::kernel::routing::NetPoint*> make_host(
    s4u::NetZone* zone, const std::vector<unsigned long>&, unsigned long id) {
  s4u::Host* const host = zone->create_host("h" + std::to_string(id), 1e9);
  if (hosts.size() <= id) hosts.resize(id + 1);
  hosts[id] = host;
  return {host->get_netpoint(), nullptr};
}

void build_crossbar() {
  const unsigned count = read_count("hosts");
  const double bandwidth = read<double>("%lf", "bandwidth");
  s4u::NetZone* const zone = s4u::create_star_zone("network");
  for (unsigned i = 0; i < count; ++i) {
    const std::string name = "h" + std::to_string(i);
    hosts.push_back(zone->create_host(name, 1e9));
    const s4u::SplitDuplexLink* const link = zone->create_split_duplex_link("l" + name, bandwidth);
    link->get_link_up()->seal();
    link->get_link_down()->seal();
    zone->add_route(hosts.back()->get_netpoint(), nullptr, nullptr, nullptr,
                    {{link, s4u::LinkInRoute::Direction::UP}}, true);
  }
  zone->seal();
}

void build_dragonfly() {
  const unsigned groups = read_count("groups"), global = read_count("global links");
  const unsigned routers = read_count("routers"), local = read_count("local links");
  const unsigned per_router = read_count("hosts per router");
  const double bandwidth = read<double>("%lf", "bandwidth");
  // SimGrid attaches the links to group g to router g, so it needs a router for every group.
  if (groups > routers) throw std::runtime_error("more groups than routers of a group");
  s4u::create_dragonfly_zone(
      "network", nullptr, {{groups, global}, {1, 1}, {routers, local}, per_router},
      s4u::ClusterCallbacks(make_host), bandwidth, 0, s4u::Link::SharingPolicy::SPLITDUPLEX)
      ->seal();
}

void build_fat_tree() {
  const unsigned leaves = read_count("leaves"), per_leaf = read_count("hosts per leaf");
  const unsigned uplinks = read_count("uplinks"), cables = read_count("cables");
  const double bandwidth = read<double>("%lf", "bandwidth");
  s4u::create_fatTree_zone("network", nullptr, {2, {per_leaf, leaves}, {1, uplinks}, {1, cables}},
                           s4u::ClusterCallbacks(make_host), bandwidth, 0,
                           s4u::Link::SharingPolicy::SPLITDUPLEX)
      ->seal();
}

void build_platform() {
  char kind[16];
  if (std::scanf("%15s", kind) != 1) throw std::runtime_error("input: no platform");
  const std::string name = kind;
  if (name == "crossbar") return build_crossbar();
  if (name == "dragonfly") return build_dragonfly();
  if (name == "fat_tree") return build_fat_tree();
  throw std::runtime_error("input: unknown platform '" + name + "'");
}

bool read_round(Round& round) {
  unsigned count;
  if (std::scanf("%u", &count) != 1) return false;
  round.resize(count);
  for (Message& m : round) {
    m.from = read_count("sender");
    m.to = read_count("receiver");
    m.bytes = read<double>("%lf", "bytes");
    if (m.from >= hosts.size() || m.to >= hosts.size()) {
      throw std::runtime_error("input: no such host");
    }
  }
  return true;
}

void play() {
  Round round;
  while (read_round(round)) {
    const double start = s4u::Engine::get_clock();
    std::vector<s4u::CommPtr> messages;
    for (const Message& m : round) {
      messages.push_back(
          s4u::Comm::sendto_async(hosts[m.from], hosts[m.to], static_cast<uint64_t>(m.bytes)));
    }
    for (const s4u::CommPtr& message : messages) message->wait();
    std::printf("%.17g\n", s4u::Engine::get_clock() - start);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    s4u::Engine engine(&argc, argv);
    // The defaults model TCP, in which acknowledgements slow a flow.
    s4u::Engine::set_config("network/model:CM02");
    s4u::Engine::set_config("network/latency-factor:1");
    s4u::Engine::set_config("network/bandwidth-factor:1");
    s4u::Engine::set_config("network/crosstraffic:0");
    s4u::Engine::set_config("network/TCP-gamma:0");
    build_platform();
    s4u::Actor::create("play", hosts.at(0), play);
    engine.run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
