#include "program.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace forerun {

void Program::list_fields(LinearArgs& args, Fields& fields) {
    fields.add_addresses(args.x, args.weight, args.bias, args.y);
    fields.rows = &args.m;
}

void Program::list_fields(GroupedArgs& args, Fields& fields) {
    fields.add_addresses(args.x, args.weight, args.bias, args.y);
    fields.rows = &args.m;
}

void Program::list_fields(NormArgs& args, Fields& fields) {
    fields.add_addresses(args.x, args.residual, args.weight, args.bias, args.y);
    fields.rows = &args.m;
}

void Program::list_fields(GatedArgs& args, Fields& fields) {
    fields.add_addresses(args.x, args.y);
    fields.rows = &args.m;
}

void Program::list_fields(EmbeddingArgs& args, Fields& fields) {
    fields.add_addresses(args.ids, args.table, args.y);
    fields.rows = &args.m;
}

void Program::list_fields(RopeArgs& args, Fields& fields) {
    fields.add_addresses(args.qkv, args.table, args.positions, args.slots, args.q_norm, args.k_norm);
    fields.rows = &args.m;
}

void Program::list_fields(AttentionArgs& args, Fields& fields) {
    fields.add_addresses(args.qkv, args.y, args.seq_ids, args.prefix_lens, args.tree_masks, args.tree_starts,
                         args.block_tables);
    fields.rows = &args.m;
    fields.max_blocks = &args.max_blocks;
    fields.max_visible = &args.max_visible;
}

void Program::list_fields(LatentRopeArgs& args, Fields& fields) {
    fields.add_addresses(args.queries, args.latents, args.table, args.positions, args.slots, args.norm);
    fields.rows = &args.m;
}

void Program::list_fields(HeadLinearArgs& args, Fields& fields) {
    fields.add_addresses(args.x, args.weight, args.y);
    fields.rows = &args.m;
}

void Program::list_fields(RouteArgs& args, Fields& fields) {
    fields.add_addresses(args.logits, args.correction, args.y);
    fields.rows = &args.m;
}

void Program::list_fields(ExpertsArgs& args, Fields& fields) {
    fields.add_addresses(args.x, args.weights, args.base, args.y);
    fields.rows = &args.m;
}

void Program::list_fields(SelectArgs& args, Fields& fields) {
    fields.add_addresses(args.x, args.row_ids, args.y);
    fields.rows = &args.r;
}

void Program::list_fields(ColumnsArgs& args, Fields& fields) {
    fields.add_addresses(args.x, args.y);
    fields.rows = &args.m;
}

void Program::list_fields(AddArgs& args, Fields& fields) {
    fields.add_addresses(args.x, args.y);
    fields.rows = &args.m;
}

void Program::list_fields(FillArgs& args, Fields& fields) {
    fields.add_addresses(args.y);
    fields.rows = &args.m;
}

void Program::list_fields(ScatterArgs& args, Fields& fields) {
    fields.add_addresses(args.x, args.ids, args.y);
    fields.rows = &args.m;
}

void Program::bind(int64_t slot, uintptr_t recorded, int64_t first_step) {
    num_slots_ = std::max(num_slots_, static_cast<size_t>(slot) + 1);
    for (size_t step = static_cast<size_t>(first_step); step < steps_.size(); ++step) {
        for (void* where : steps_[step]->fields.addresses) {
            uintptr_t address;
            std::memcpy(&address, where, sizeof address);
            if (address == recorded) patches_.push_back({where, static_cast<size_t>(slot)});
        }
    }
}

void Program::finish(int64_t recorded_rows, int64_t recorded_logit_rows) {
    for (const std::unique_ptr<Step>& step : steps_) {
        const Fields& fields = step->fields;
        if (*fields.rows != recorded_rows && *fields.rows != recorded_logit_rows) {
            throw std::invalid_argument("an op over " + std::to_string(*fields.rows) + " rows cannot be replayed");
        }
        (*fields.rows == recorded_rows ? rows_ : logit_rows_).push_back(fields.rows);
        if (fields.max_blocks) max_blocks_.push_back(fields.max_blocks);
        if (fields.max_visible) max_visible_.push_back(fields.max_visible);
    }
}

void Program::run(const std::vector<uintptr_t>& addresses, const RunSizes& sizes) {
    if (addresses.size() < num_slots_) throw std::invalid_argument("too few addresses for this program");
    for (const Patch& patch : patches_) std::memcpy(patch.where, &addresses[patch.slot], sizeof(uintptr_t));
    for (int64_t* where : rows_) *where = sizes.rows;
    for (int64_t* where : logit_rows_) *where = sizes.logit_rows;
    for (int64_t* where : max_blocks_) *where = sizes.max_blocks;
    for (int64_t* where : max_visible_) *where = sizes.max_visible;
    for (const std::unique_ptr<Step>& step : steps_) step->run(engine_);
}

}  // namespace forerun
