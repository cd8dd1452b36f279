#include "suffix.h"

#include <algorithm>
#include <utility>

namespace forerun {

SuffixAutomaton::SuffixAutomaton(int32_t window) : window_(window), states_(1), slots_(64, -1) {
    states_[kRoot].link = -1;
}

void SuffixAutomaton::append(int32_t token) {
    whole_ = insert(token);
    const int32_t tail = shorten(tail_, std::min(size_, window_));  // what was inserted may have split it
    ++size_;
    tail_ = shorten(edges_[find_edge(tail, token)].to, std::min(size_, window_));
    for (int32_t at = tail_; at != kRoot; at = states_[at].link) {
        State& state = states_[at];
        ++state.count;
        state.earlier = state.end;
        state.end = size_;
    }
}

// The new state of the whole text.
int32_t SuffixAutomaton::insert(int32_t token) {
    const int32_t added = new_state(states_[whole_].length + 1);
    int32_t state = whole_, edge = -1;
    while (state >= 0 && (edge = find_edge(state, token)) < 0) {
        add_edge(state, token, added);
        state = states_[state].link;
    }
    const int32_t link = state < 0 ? kRoot : split(state, token, edge);
    states_[added].link = link;
    return added;
}

// The state of `state`'s longest substring with `token` behind it, split off where it was part of another.
int32_t SuffixAutomaton::split(int32_t state, int32_t token, int32_t edge) {
    const int32_t old = edges_[edge].to;
    if (states_[old].length == states_[state].length + 1) return old;
    const int32_t part = new_state(states_[state].length + 1);
    const State from = states_[old];
    states_[part].link = from.link;
    states_[part].count = from.count;
    states_[part].end = from.end;
    states_[part].earlier = from.earlier;
    for (int32_t e = from.first_edge; e >= 0; e = edges_[e].next) add_edge(part, edges_[e].token, edges_[e].to);
    while (edge >= 0 && edges_[edge].to == old) {
        edges_[edge].to = part;
        state = states_[state].link;
        edge = state >= 0 ? find_edge(state, token) : -1;
    }
    states_[old].link = part;
    return part;
}

int32_t SuffixAutomaton::shorten(int32_t state, int32_t length) const {
    while (states_[state].link >= 0 && states_[states_[state].link].length >= length) state = states_[state].link;
    return state;
}

SuffixMatch SuffixAutomaton::follow(SuffixMatch match, int32_t token) const {
    int32_t edge = find_edge(match.state, token);
    while (edge < 0 && match.state != kRoot) {
        match.state = states_[match.state].link;
        match.length = states_[match.state].length;
        edge = find_edge(match.state, token);
    }
    if (edge < 0) return {};
    const int32_t length = std::min(match.length + 1, window_ - 1);
    return {shorten(edges_[edge].to, length), length};
}

SuffixMatch SuffixAutomaton::repeated_tail(int32_t longest) const {
    const int32_t length = std::min(size_, longest);
    const int32_t state = shorten(tail_, length);
    if (state == kRoot) return {};
    if (states_[state].count > 1) return {state, length};
    return {states_[state].link, states_[states_[state].link].length};
}

int32_t SuffixAutomaton::new_state(int32_t length) {
    states_.emplace_back();
    states_.back().length = length;
    return static_cast<int32_t>(states_.size()) - 1;
}

void SuffixAutomaton::add_edge(int32_t from, int32_t token, int32_t to) {
    const int32_t added = static_cast<int32_t>(edges_.size());
    edges_.push_back({from, token, to, -1});
    State& state = states_[from];
    if (state.last_edge >= 0) edges_[state.last_edge].next = added;
    if (state.first_edge < 0) state.first_edge = added;
    state.last_edge = added;
    if (++state.num_edges == kListed + 1) {
        for (int32_t edge = state.first_edge; edge >= 0; edge = edges_[edge].next) hash_edge(edge);
    } else if (state.num_edges > kListed) {
        hash_edge(added);
    }
}

int32_t SuffixAutomaton::find_edge(int32_t from, int32_t token) const {
    const State& state = states_[from];
    if (state.num_edges > kListed) return slots_[slot_of(from, token)];
    int32_t edge = state.first_edge;
    while (edge >= 0 && edges_[edge].token != token) edge = edges_[edge].next;
    return edge;
}

void SuffixAutomaton::hash_edge(int32_t edge) {
    if (2 * ++num_hashed_ > slots_.size()) {
        const std::vector<int32_t> before = std::exchange(slots_, std::vector<int32_t>(slots_.size() * 4, -1));
        for (int32_t known : before)
            if (known >= 0) slots_[slot_of(edges_[known].from, edges_[known].token)] = known;
    }
    slots_[slot_of(edges_[edge].from, edges_[edge].token)] = edge;
}

// The slot of an edge, or the empty one where it belongs.
uint32_t SuffixAutomaton::slot_of(int32_t from, int32_t token) const {
    const uint32_t mask = static_cast<uint32_t>(slots_.size()) - 1;
    const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(from)) << 32 | static_cast<uint32_t>(token);
    uint32_t slot = static_cast<uint32_t>(key * 0x9E3779B97F4A7C15u >> 32) & mask;
    while (slots_[slot] >= 0) {
        const Edge& edge = edges_[slots_[slot]];
        if (edge.from == from && edge.token == token) break;
        slot = (slot + 1) & mask;
    }
    return slot;
}

}  // namespace forerun
