#include "suffix_text.h"

#include <algorithm>
#include <cmath>
#include <queue>

namespace forerun {
namespace {

// The constants of suffix_reference.py, which says what they are.
constexpr int32_t kBoundary = -1, kMaxEdges = 64;
constexpr int32_t kHandicap = 5;
constexpr int kMaxLevels = 6, kMaxPlaces = 2;
constexpr double kFaint = 0.25, kEscape = 2.5, kRecent = 1.0;

// Where each automaton stands, the request's own first, and where the store does.
struct Context {
    SuffixMatch matches[kMaxPlaces];
    StoreMatch stored;
};

struct Chance {
    int32_t token;
    double value;
};

class Grower {
   public:
    Grower(const SuffixAutomaton& own, const SuffixAutomaton* corpus, const SuffixStore* store)
        : automata_{&own, corpus}, num_places_(corpus ? 2 : 1), store_(store) {}

    std::vector<SuffixGuess> grow(const Context& root, int32_t max_nodes, double least) {
        std::vector<SuffixGuess> guesses;
        std::vector<Context> contexts{root};  // of the root, then of every guess
        double chance = 1.0;
        while (static_cast<int32_t>(guesses.size()) < max_nodes) {
            predict(contexts.back(), least / chance);
            for (const Chance& next : chances_)
                if (next.token >= 0 && chance * next.value >= least)
                    waiting_.push({chance * next.value, num_seen_++, static_cast<int32_t>(guesses.size()) - 1,
                                   next.token});
            if (waiting_.empty()) break;
            const Waiting best = waiting_.top();
            waiting_.pop();
            chance = best.chance;
            guesses.push_back({best.parent, best.token, best.chance});
            contexts.push_back(follow(contexts[best.parent + 1], best.token));
        }
        return guesses;
    }

   private:
    struct Waiting {
        double chance;
        int64_t order;
        int32_t parent, token;
        bool operator<(const Waiting& other) const {
            return chance != other.chance ? chance < other.chance : order > other.order;
        }
    };

    Context follow(Context context, int32_t token) const {
        for (int i = 0; i < num_places_; ++i) context.matches[i] = automata_[i]->follow(context.matches[i], token);
        if (store_) context.stored = store_->follow(context.stored, token, automata_[0]->window() - 1);
        return context;
    }

    // Fills chances_ from the longest matches first until less than `least` is left for shorter ones.
    void predict(Context context, double least) {
        chances_.clear();
        double left = 1.0;
        for (int level = 0; level < kMaxLevels && left >= least; ++level) {
            const int place = num_places_ > 1 && context.matches[1].length > context.matches[0].length;
            SuffixMatch& match = context.matches[place];
            if (is_stored_next(match.length, context.stored.length)) {
                left *= blend_stored(context.stored, left, least);
                context.stored = store_->shorter(context.stored);
                continue;
            }
            if (match.length == 0) return;
            left *= blend(*automata_[place], match, left, least);
            match.state = automata_[place]->link_of(match.state);
            match.length = automata_[place]->length_of(match.state);
        }
    }

    static bool is_stored_next(int32_t length, int32_t stored) {
        return stored > 0 && (length == 0 || stored - kHandicap > length);
    }

    double blend_stored(StoreMatch match, double left, double least) {
        const auto followers = store_->followers(match);
        const double num = static_cast<double>(SuffixStore::num_sampled(match));
        const double weight = kEscape * std::sqrt(static_cast<double>(followers.size())) / match.length;
        const double escape = weight / (num + weight);
        const double share = left * (1.0 - escape) / num;
        for (const auto& next : followers) add(next.token, share * static_cast<double>(next.count), kFaint * least);
        return escape;
    }

    // Adds one match's part of the chance that is left; the part it leaves to shorter ones.
    double blend(const SuffixAutomaton& automaton, SuffixMatch match, double left, double least) {
        const int32_t num = automaton.num_continued(match.state);
        if (num <= 0) return 1.0;
        const int32_t num_followers = std::min(automaton.num_edges(match.state), kMaxEdges);
        const double weight = kEscape * std::sqrt(static_cast<double>(num_followers)) / match.length;
        const double escape = weight / (num + weight);
        const double share = left * (1.0 - escape) / (num + kRecent);
        automaton.for_continuations(match.state, kMaxEdges, [&](int32_t token, int32_t count, bool is_latest) {
            add(token, share * (count + (is_latest ? kRecent : 0.0)), kFaint * least);
        });
        return escape;
    }

    void add(int32_t token, double value, double faint) {
        for (Chance& known : chances_)
            if (known.token == token) {
                known.value += value;
                return;
            }
        if (value >= faint) chances_.push_back({token, value});
    }

    const SuffixAutomaton* automata_[kMaxPlaces];
    const int num_places_;
    const SuffixStore* store_;
    std::vector<Chance> chances_;
    std::priority_queue<Waiting> waiting_;
    int64_t num_seen_ = 0;
};

}  // namespace

SuffixCorpus::SuffixCorpus(int64_t max_tokens, int32_t window)
    : max_tokens_(std::max<int64_t>(max_tokens, 2)),
      now_(std::make_unique<SuffixAutomaton>(window)),
      next_(std::make_unique<SuffixAutomaton>(window)) {}

void SuffixCorpus::add(const std::vector<int32_t>& tokens) {
    const int64_t half = max_tokens_ / 2, num = static_cast<int64_t>(tokens.size());
    const int64_t skipped = std::max<int64_t>(0, num - half + 1);  // half a corpus holds the rest and its end mark
    std::vector<int32_t> text(tokens.begin() + skipped, tokens.end());
    text.push_back(kBoundary);
    if (now_->size() + static_cast<int64_t>(text.size()) > max_tokens_) {
        now_ = std::move(next_);
        next_ = std::make_unique<SuffixAutomaton>(now_->window());
    }
    ++num_added_;
    const bool both = now_->size() >= half;
    for (int32_t token : text) {
        now_->append(token);
        if (both) next_->append(token);
    }
}

void SuffixText::extend(const std::vector<int32_t>& tokens) {
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
    for (int32_t token : tokens) automaton_.append(token);
}

SuffixCopy SuffixText::copy(int32_t shortest, int32_t longest, int32_t num) const {
    const SuffixMatch match = automaton_.repeated_tail(longest);
    if (match.length < shortest) return {};
    const int32_t start = automaton_.earlier_end(match.state), period = automaton_.size() - start;
    SuffixCopy copied{match.length, std::vector<int32_t>(num)};
    for (int32_t i = 0; i < num; ++i) copied.tokens[i] = tokens_[start + i % period];
    return copied;
}

// Where the longest end of the text is found in the corpus: followed on from the last time, unless that was long ago or
// the corpus has changed.
SuffixMatch SuffixText::corpus_match() {
    const SuffixAutomaton& corpus = corpus_->automaton();
    const size_t longest = corpus.window() - 1, start = tokens_.size() - std::min(tokens_.size(), longest);
    if (num_added_ != corpus_->num_added() || num_followed_ < start) {
        followed_ = {};
        num_followed_ = start;
        num_added_ = corpus_->num_added();
    }
    while (num_followed_ < tokens_.size()) followed_ = corpus.follow(followed_, tokens_[num_followed_++]);
    return followed_;
}

std::vector<SuffixGuess> SuffixText::grow(int32_t max_nodes, double least) {
    Context context;
    context.matches[0] = automaton_.repeated_tail(automaton_.window() - 1);
    if (corpus_) context.matches[1] = corpus_match();
    if (store_) {
        const int32_t num = static_cast<int32_t>(std::min<size_t>(tokens_.size(), automaton_.window() - 1));
        context.stored = store_->longest(tokens_.data() + tokens_.size() - num, num);
    }
    return Grower(automaton_, corpus_ ? &corpus_->automaton() : nullptr, store_).grow(context, max_nodes, least);
}

}  // namespace forerun
