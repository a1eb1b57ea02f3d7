"""Steps of papers and of libraries for vision, self-supervised learning and generative models."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from train_steps.row import ConvNet, Denoiser, Script, mlp, row


def xy(d):
    return d.x(8), d.ints(4)


@row("timm: train.py", independent=False)
def mixup_with_soft_targets_and_ema():
    model = ConvNet()
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)

    def train(model, ema, optimizer, x, y, num_updates):
        lam = np.random.beta(0.8, 0.8)  # noqa: NPY002 - as the library draws it
        target = F.one_hot(y, 4).double() * 0.9 + 0.025
        x = lam * x + (1 - lam) * x.flip(0)
        target = lam * target + (1 - lam) * target.flip(0)
        loss = torch.sum(-target * F.log_softmax(model(x), dim=-1), dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for e, m in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
                e.copy_(0.9 * e + 0.1 * m)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.5 * (1 + math.cos(math.pi * num_updates / 10))
        return loss.item()

    return Script(train, (model, ema, optimizer), lambda d: (d.x(1, 8, 8), d.ints(4), d.call), [model, ema])


@row("timm: adaptive gradient clipping")
def adaptive_gradient_clipping():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def unitwise(x):
        return x.norm() if x.ndim <= 1 else x.norm(dim=tuple(range(1, x.ndim)), keepdim=True)

    def train(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            limit = unitwise(p.detach()).clamp_(min=1e-3).mul_(0.02)
            norm = unitwise(p.grad.detach())
            clipped = p.grad.detach() * (limit / norm.clamp(min=1e-6))
            p.grad.detach().copy_(torch.where(norm < limit, p.grad.detach(), clipped))
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), xy, [model])


@row("timm: DropPath", independent=False)
def stochastic_depth():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList([mlp(8, 16, 8) for _ in range(3)]), nn.Linear(8, 4)

        def forward(self, x):
            for i, block in enumerate(self.blocks):
                keep = 1 - 0.2 * i
                mask = x.new_empty(len(x), 1).bernoulli_(keep) if self.training else keep
                x = x + block(x) * mask / keep
            return self.head(x)

    model = Net()
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, x, y):
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), xy, [model])


@row("BEiT: layer-wise learning rates")
def layer_wise_learning_rates_and_weight_decay_schedule():
    model = mlp()
    layers = [model[0], model[2], model[4]]
    optimizer = AdamW([{"params": m.parameters(), "lr_scale": 0.7 ** (2 - i)} for i, m in enumerate(layers)], lr=1e-2)

    def train(model, optimizer, x, y, it):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1, (it + 1) / 4) * group["lr_scale"]
            group["weight_decay"] = 0.1 * (it + 1) / 7
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (*xy(d), d.call), [model])


@row("DeiT: hard distillation")
def hard_distillation_token():
    teacher, student = mlp(), mlp(8, 16, 8)
    optimizer = AdamW(student.parameters(), lr=1e-2)

    def train(student, teacher, optimizer, x, y):
        cls, dist_token = student(x).chunk(2, dim=1)
        with torch.no_grad():
            labels = teacher(x).argmax(1)
        loss = 0.5 * F.cross_entropy(cls, y) + 0.5 * F.cross_entropy(dist_token, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (student, teacher, optimizer), xy, [student])


@row("SimCLR", independent=False)
def simclr():
    model = mlp(8, 16, 8)
    optimizer = Adam(model.parameters(), lr=1e-2)

    def train(model, optimizer, one, two):
        z = F.normalize(model(torch.cat([one, two])), dim=1)
        logits = z @ z.T / 0.5
        logits.fill_diagonal_(float("-inf"))
        n = len(one)
        loss = F.cross_entropy(logits, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (d.x(8), d.x(8)), [model])


@row("MoCo", independent=False)
def moco_with_a_queue_in_buffers():
    class MoCo(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder_q, self.encoder_k = mlp(8, 16, 8), mlp(8, 16, 8)
            self.encoder_k.load_state_dict(self.encoder_q.state_dict())
            self.encoder_k.requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(8, 12), dim=0))
            self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

        def forward(self, q, k):
            q = F.normalize(self.encoder_q(q), dim=1)
            with torch.no_grad():
                for a, b in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                    b.data = b.data * 0.9 + a.data * 0.1
                k = F.normalize(self.encoder_k(k), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.2
            at = int(self.ptr)
            self.queue[:, at : at + len(k)] = k.T
            self.ptr[0] = (at + len(k)) % 12
            return logits, torch.zeros(len(q), dtype=torch.long)

    model = MoCo()
    optimizer = SGD(model.encoder_q.parameters(), lr=0.1, momentum=0.9)

    def train(model, optimizer, q, k):
        logits, labels = model(q, k)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (d.x(8), d.x(8)), [model])


@row("BYOL")
def byol_with_a_target_network():
    online, predictor = mlp(8, 16, 8), mlp(8, 16, 8)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = Adam([*online.parameters(), *predictor.parameters()], lr=1e-2)

    def train(online, predictor, target, optimizer, one, two):
        p1, p2 = predictor(online(one)), predictor(online(two))
        with torch.no_grad():
            t1, t2 = target(one), target(two)
        loss = (2 - F.cosine_similarity(p1, t2) - F.cosine_similarity(p2, t1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for o, t in zip(online.parameters(), target.parameters(), strict=True):
                t.mul_(0.9).add_(o, alpha=0.1)
        return loss

    return Script(
        train, (online, predictor, target, optimizer), lambda d: (d.x(8), d.x(8)), [online, predictor, target]
    )  # fmt: skip


@row("DINO", independent=False)
def dino_with_centre_momentum_and_frozen_last_layer():
    student, teacher = mlp(8, 16, 8), mlp(8, 16, 8)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    optimizer = AdamW(student.parameters(), lr=1e-2)
    state = {"center": torch.zeros(1, 8)}
    momentum = [0.9 + 0.01 * i for i in range(10)]

    def train(student, teacher, optimizer, one, two, it):
        teacher_out = F.softmax((teacher(one) - state["center"]) / 0.04, dim=-1).detach()
        loss = torch.sum(-teacher_out * F.log_softmax(student(two) / 0.1, dim=-1), dim=-1).mean()
        if not math.isfinite(loss.item()):
            raise SystemExit(1)
        optimizer.zero_grad()
        loss.backward()
        for p in student.parameters():
            coefficient = 3.0 / (p.grad.norm(2) + 1e-6)
            if coefficient < 1:
                p.grad.mul_(coefficient)
        if it < 2:
            for n, p in student.named_parameters():
                if n.startswith("4"):
                    p.grad = None
        optimizer.step()
        with torch.no_grad():
            m = momentum[it]
            for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
                k.data.mul_(m).add_((1 - m) * q.detach().data)
            state["center"] = state["center"] * 0.9 + teacher(one).mean(0, keepdim=True) * 0.1
        return loss.item()

    return Script(
        train, (student, teacher, optimizer), lambda d: (d.x(8), d.x(8), d.call), [student, teacher, lambda: state]
    )  # fmt: skip


@row("Barlow Twins", independent=False)
def barlow_twins():
    model = nn.Sequential(mlp(8, 16, 6), nn.BatchNorm1d(6, affine=False))
    optimizer = SGD(model.parameters(), lr=0.05)

    def train(model, optimizer, one, two):
        c = model(one).T @ model(two) / len(one)
        on = torch.diagonal(c).add_(-1).pow_(2).sum()
        off = c.flatten()[:-1].view(5, 7)[:, 1:].flatten().pow(2).sum()
        loss = on + 0.005 * off
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (d.x(8), d.x(8)), [model])


@row("VICReg", independent=False)
def vicreg():
    model = mlp(8, 16, 6)
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, one, two):
        x, y = model(one), model(two)
        loss = 25 * F.mse_loss(x, y)
        for z in (x, y):
            z = z - z.mean(0)
            loss = loss + F.relu(1 - torch.sqrt(z.var(0) + 1e-4)).mean()
            cov = z.T @ z / (len(z) - 1)
            loss = loss + (cov - torch.diag(torch.diagonal(cov))).pow(2).sum() / 6
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (d.x(8), d.x(8)), [model])


@row("SwAV", independent=False)
def swav_with_sinkhorn_and_normalised_prototypes():
    model, prototypes = mlp(8, 16, 8), nn.Linear(8, 6, bias=False)
    optimizer = SGD([*model.parameters(), *prototypes.parameters()], lr=0.1)

    @torch.no_grad()
    def sinkhorn(out):
        q = torch.exp(out / 0.5).t()
        q /= q.sum()
        for _ in range(3):
            q /= q.sum(1, keepdim=True) * q.shape[0]
            q /= q.sum(0, keepdim=True) * q.shape[1]
        return (q * q.shape[1]).t()

    def train(model, prototypes, optimizer, one, two):
        with torch.no_grad():
            w = F.normalize(prototypes.weight.data.clone(), dim=1, p=2)
            prototypes.weight.copy_(w)
        a, b = (prototypes(F.normalize(model(v), dim=1)) for v in (one, two))
        loss = -(sinkhorn(b.detach()) * F.log_softmax(a / 0.1, 1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, prototypes, optimizer), lambda d: (d.x(8), d.x(8)), [model, prototypes])


@row("MAE", independent=False)
def masked_autoencoder():
    class Mae(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec, self.mask = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.zeros(1, 1, 8))

        def forward(self, x):
            keep = torch.rand(x.shape[:2]).argsort(1)[:, :3]
            index = keep.unsqueeze(-1).expand(-1, -1, 8)
            latent = torch.tanh(self.enc(x)).gather(1, index)
            full = self.mask.expand(len(x), x.shape[1], -1).scatter(1, index, latent)
            return (self.dec(full) - x).pow(2).mean()

    model = Mae()
    optimizer = AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))

    def train(model, optimizer, x):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Script(train, (model, optimizer), lambda d: (d.x(6, 4),), [model])


@row("SimSiam")
def simsiam():
    encoder, predictor = mlp(8, 16, 8), mlp(8, 4, 8)
    optimizer = SGD([{"params": encoder.parameters()}, {"params": predictor.parameters(), "fix_lr": True}], lr=0.05)

    def train(encoder, predictor, optimizer, one, two):
        z1, z2 = encoder(one), encoder(two)
        loss = -0.5 * (F.cosine_similarity(predictor(z1), z2.detach()).mean()
                       + F.cosine_similarity(predictor(z2), z1.detach()).mean())  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (encoder, predictor, optimizer), lambda d: (d.x(8), d.x(8)), [encoder, predictor])


@row("diffusers: train_unconditional", independent=False)
def ddpm_with_snr_weights_and_ema():
    model = Denoiser()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    ema = [p.detach().clone() for p in model.parameters()]
    alphas = torch.linspace(0.99, 0.1, 10)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 4))

    def train(model, optimizer, lr_scheduler, clean):
        noise = torch.randn_like(clean)
        t = torch.randint(0, 10, (len(clean),))
        a = alphas[t].unsqueeze(1)
        noisy = a.sqrt() * clean + (1 - a).sqrt() * noise
        snr = (a / (1 - a)).squeeze(1)
        each = F.mse_loss(model(noisy, t), noise, reduction="none").mean(1)
        loss = (each * torch.minimum(snr, torch.full_like(snr, 5.0)) / snr).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for s, p in zip(ema, model.parameters(), strict=True):
                s.sub_(0.1 * (s - p))
        return loss.detach().item()

    return Script(train, (model, optimizer, lr_scheduler), lambda d: (d.x(8),), [model, ema])


@row("diffusers: textual_inversion", independent=False)
def textual_inversion_restores_other_embeddings():
    embed, unet = nn.Embedding(10, 8), mlp(16, 16, 8).requires_grad_(False)
    optimizer = AdamW(embed.parameters(), lr=1e-2)
    orig = embed.weight.data.clone()
    no_updates = torch.ones(10, dtype=torch.bool)
    no_updates[9] = False

    def train(embed, unet, optimizer, ids, latents):
        noise = torch.randn_like(latents)
        ids = ids.clone()
        ids[:, 0] = 9
        cond = embed(ids).mean(1)
        loss = F.mse_loss(unet(torch.cat([latents + noise, cond], 1)), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            embed.weight[no_updates] = orig[no_updates]
        return loss

    return Script(train, (embed, unet, optimizer), lambda d: (d.ints(9, 3), d.x(8)), [embed])


@row("diffusers: dreambooth", independent=False)
def dreambooth_with_prior_preservation():
    model = Denoiser()
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, instance, prior):
        x = torch.cat([instance, prior])
        noise, t = torch.randn_like(x), torch.randint(0, 10, (len(x),))
        pred, pred_prior = model(x + noise, t).chunk(2)
        target, target_prior = noise.chunk(2)
        loss = F.mse_loss(pred, target) + 0.5 * F.mse_loss(pred_prior, target_prior)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Script(train, (model, optimizer), lambda d: (d.x(8), d.x(8)), [model])


@row("flow matching (Stable Diffusion 3)", independent=False)
def flow_matching_with_logit_normal_times():
    model = mlp(9, 16, 8, nn.SiLU)
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, x1):
        t = torch.sigmoid(torch.randn(len(x1), 1))
        x0 = torch.randn_like(x1)
        loss = (model(torch.cat([(1 - t) * x0 + t * x1, t], 1)) - (x1 - x0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (d.x(8),), [model])


@row("consistency distillation", independent=False)
def consistency_model_with_ema_target():
    model, target = Denoiser(), Denoiser()
    target.load_state_dict(model.state_dict())
    target.requires_grad_(False)
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)

    def train(model, target, optimizer, x, mu):
        t = torch.randint(0, 9, (len(x),))
        z = torch.randn_like(x)
        loss = F.huber_loss(model(x + z * (t + 1).unsqueeze(1), t + 1), target(x + z * t.unsqueeze(1), t))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(target.parameters(), model.parameters(), strict=True):
                a.lerp_(b, 1 - mu)
        return loss

    return Script(train, (model, target, optimizer), lambda d: (d.x(8), 0.9 + 0.01 * d.call), [model, target])


@row("WGAN")
def wgan_with_clipped_weights():
    G, C = mlp(8, 16, 6), mlp(6, 16, 1)
    g_opt, c_opt = torch.optim.RMSprop(G.parameters(), 5e-3), torch.optim.RMSprop(C.parameters(), 5e-3)

    def train(G, C, g_opt, c_opt, z, real, i):
        c_opt.zero_grad()
        loss = -C(real).mean() + C(G(z).detach()).mean()
        loss.backward()
        c_opt.step()
        for p in C.parameters():
            p.data.clamp_(-0.1, 0.1)
        if i % 3 == 0:
            g_opt.zero_grad()
            (-C(G(z)).mean()).backward()
            g_opt.step()
        return loss.item()

    return Script(train, (G, C, g_opt, c_opt), lambda d: (d.x(8), d.x(6), d.call), [G, C])


@row("WGAN-GP", independent=False)
def wgan_with_gradient_penalty():
    G, C = mlp(8, 16, 6), mlp(6, 16, 1)
    g_opt, c_opt = Adam(G.parameters(), 1e-3, (0.0, 0.9)), Adam(C.parameters(), 1e-3, (0.0, 0.9))

    def train(G, C, g_opt, c_opt, z, real):
        fake = G(z).detach()
        a = torch.rand(len(real), 1)
        mixed = (a * real + (1 - a) * fake).requires_grad_(True)
        out = C(mixed)
        (grad,) = torch.autograd.grad(out, mixed, torch.ones_like(out), create_graph=True, retain_graph=True)
        c_loss = C(fake).mean() - C(real).mean() + 10 * ((grad.norm(2, dim=1) - 1) ** 2).mean()
        c_opt.zero_grad()
        c_loss.backward()
        c_opt.step()
        g_opt.zero_grad()
        g_loss = -C(G(z)).mean()
        g_loss.backward()
        g_opt.step()
        return c_loss, g_loss

    return Script(train, (G, C, g_opt, c_opt), lambda d: (d.x(8), d.x(6)), [G, C])


@row("StyleGAN2", independent=False)
def stylegan_with_lazy_r1_and_ema():
    G, D = mlp(8, 16, 6), mlp(6, 16, 1)
    g_ema = copy.deepcopy(G).requires_grad_(False)
    g_opt, d_opt = Adam(G.parameters(), 2e-3, (0.0, 0.99)), Adam(D.parameters(), 2e-3, (0.0, 0.99))

    def train(real, i):
        D.requires_grad_(True)
        G.requires_grad_(False)
        loss = F.softplus(D(G(torch.randn(4, 8)))).mean() + F.softplus(-D(real)).mean()
        D.zero_grad()
        loss.backward()
        d_opt.step()
        if i % 4 == 0:
            real.requires_grad = True
            (grad,) = torch.autograd.grad(D(real).sum(), real, create_graph=True)
            D.zero_grad()
            (5 * grad.pow(2).sum(1).mean() * 4).backward()
            d_opt.step()
        D.requires_grad_(False)
        G.requires_grad_(True)
        g_loss = F.softplus(-D(G(torch.randn(4, 8)))).mean()
        G.zero_grad()
        g_loss.backward()
        g_opt.step()
        for e, p in zip(g_ema.parameters(), G.parameters(), strict=True):
            e.data.mul_(0.9).add_(p.data, alpha=0.1)
        return loss.item()

    return Script(train, (), lambda d: (d.x(6), d.call), [G, D, g_ema])


@row("CycleGAN", independent=False)
def cyclegan_with_an_image_pool():
    A, B, DA, DB = mlp(6, 8, 6), mlp(6, 8, 6), mlp(6, 8, 1), mlp(6, 8, 1)
    g_opt = Adam([*A.parameters(), *B.parameters()], 1e-3)
    d_opt = Adam([*DA.parameters(), *DB.parameters()], 1e-3)
    pool = []

    def query(images):
        pool.append(images)
        return pool[random.randrange(len(pool))]

    def train(a, b):
        fake_b, fake_a = A(a), B(b)
        g = F.mse_loss(DB(fake_b), torch.ones(4, 1)) + F.mse_loss(DA(fake_a), torch.ones(4, 1))
        g = g + 10 * (F.l1_loss(B(fake_b), a) + F.l1_loss(A(fake_a), b))
        g_opt.zero_grad()
        g.backward()
        g_opt.step()
        d_opt.zero_grad()
        d = F.mse_loss(DB(b), torch.ones(4, 1)) + F.mse_loss(DB(query(fake_b.detach())), torch.zeros(4, 1))
        d = d + F.mse_loss(DA(a), torch.ones(4, 1)) + F.mse_loss(DA(fake_a.detach()), torch.zeros(4, 1))
        d.backward()
        d_opt.step()
        return g.item(), d.item()

    return Script(train, (), lambda d: (d.x(6), d.x(6)), [A, B, DA, DB])


@row("SNGAN: hinge loss", independent=False)
def hinge_gan_with_spectral_norm():
    G = mlp(8, 16, 6)
    D = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 16)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(16, 1)))
    g_opt, d_opt = Adam(G.parameters(), 2e-3), Adam(D.parameters(), 2e-3)

    def train(G, D, g_opt, d_opt, z, real):
        d_opt.zero_grad()
        loss = F.relu(1 - D(real)).mean() + F.relu(1 + D(G(z).detach())).mean()
        loss.backward()
        d_opt.step()
        g_opt.zero_grad()
        (-D(G(z)).mean()).backward()
        g_opt.step()
        return loss

    return Script(train, (G, D, g_opt, d_opt), lambda d: (d.x(8), d.x(6)), [G, D])


@row("VQ-VAE", independent=False)
def vector_quantisation_with_straight_through():
    class Vq(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec, self.book = nn.Linear(8, 4), nn.Linear(4, 8), nn.Embedding(6, 4)

        def forward(self, x):
            z = self.enc(x)
            index = torch.cdist(z, self.book.weight).argmin(1)
            q = self.book(index)
            loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
            return F.mse_loss(self.dec(z + (q - z).detach()), x) + loss, index

    model = Vq()
    optimizer = Adam(model.parameters(), lr=1e-2)

    def train(model, optimizer, x):
        optimizer.zero_grad()
        loss, index = model(x)
        loss.backward()
        optimizer.step()
        return loss, torch.bincount(index, minlength=6).sum()

    return Script(train, (model, optimizer), lambda d: (d.x(8),), [model])


@row("NeRF", independent=False)
def radiance_field_with_random_rays():
    model = mlp(18, 16, 4, nn.ReLU)
    optimizer = Adam(model.parameters(), lr=5e-3)

    def train(model, optimizer, origins, colours, step):
        t = torch.linspace(0, 1, 5) + torch.rand(len(origins), 5) / 5
        points = origins.unsqueeze(1) + t.unsqueeze(-1)
        code = torch.cat([f(points * 2.0**i) for i in range(3) for f in (torch.sin, torch.cos)], -1)
        raw = model(code)
        alpha = 1 - torch.exp(-F.relu(raw[..., 3]) / 5)
        weights = alpha * torch.cumprod(torch.cat([torch.ones(len(alpha), 1), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        loss = F.mse_loss((weights.unsqueeze(-1) * torch.sigmoid(raw[..., :3])).sum(1), colours)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * 0.1 ** (step / 10)
        return loss, -10.0 * torch.log10(loss.detach())

    return Script(train, (model, optimizer), lambda d: (d.x(3), d.unit(3), d.call), [model])


@row("physics-informed networks")
def residual_of_a_differential_equation():
    model = mlp(2, 16, 1)
    optimizer = Adam(model.parameters(), lr=1e-2)

    def train(model, optimizer, points, border, values):
        points = points.clone().requires_grad_()
        u = model(points)
        (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        loss = (first[:, 1] - 0.1 * second[:, 0]).pow(2).mean() + F.mse_loss(model(border), values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (d.unit(2), d.unit(2), d.x(1)), [model])


@row("RealNVP")
def normalising_flow():
    nets = nn.ModuleList([mlp(4, 16, 8) for _ in range(2)])
    optimizer = Adam(nets.parameters(), lr=1e-2)

    def train(nets, optimizer, x):
        log_det = 0.0
        for net in nets:
            a, b = x.chunk(2, 1)
            s, t = net(a).chunk(2, 1)
            s = torch.tanh(s)
            x, log_det = torch.cat([b * s.exp() + t, a], 1), log_det + s.sum(1)
        loss = (0.5 * x.pow(2).sum(1) - log_det).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (nets, optimizer), lambda d: (d.x(8),), [nets])


@row("SAM (davda54/sam)")
def sharpness_aware_with_two_passes_in_the_step():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(model, optimizer, x, y):
        F.cross_entropy(model(x), y).backward()
        norm = torch.norm(torch.stack([p.grad.norm(2) for p in model.parameters()]), 2)
        moves = []
        with torch.no_grad():
            for p in model.parameters():
                e = p.grad * (0.05 / (norm + 1e-12))
                p.add_(e)
                moves.append(e)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moves, strict=True):
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Script(train, (model, optimizer), xy, [model])


@row("R-Drop", independent=False)
def r_drop():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, x, y):
        one, two = model(x), model(x)
        p, q = F.log_softmax(one, -1), F.log_softmax(two, -1)
        kl = 0.5 * (F.kl_div(p, q.exp(), reduction="batchmean") + F.kl_div(q, p.exp(), reduction="batchmean"))
        loss = 0.5 * (F.cross_entropy(one, y) + F.cross_entropy(two, y)) + kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), xy, [model])


@row("PGD adversarial training (Madry)", independent=False)
def pgd_adversarial_training():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)

    def train(model, optimizer, x, y):
        model.eval()
        adv = x + torch.empty_like(x).uniform_(-0.1, 0.1)
        for _ in range(3):
            adv = adv.detach().requires_grad_()
            (grad,) = torch.autograd.grad(F.cross_entropy(model(adv), y), adv)
            adv = torch.min(torch.max(adv + 0.03 * grad.sign(), x - 0.1), x + 0.1)
        model.train()
        loss = F.cross_entropy(model(adv.detach()), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), xy, [model])


@row("FreeLB", independent=False)
def free_large_batch_perturbations():
    embed, model = nn.Embedding(12, 8), mlp()
    optimizer = AdamW([*embed.parameters(), *model.parameters()], lr=1e-2)

    def train(embed, model, optimizer, ids, y):
        optimizer.zero_grad()
        delta = torch.zeros(len(ids), 3, 8).uniform_(-0.1, 0.1)
        for _ in range(2):
            delta.requires_grad_()
            loss = F.cross_entropy(model((embed(ids) + delta).mean(1)), y) / 2
            loss.backward()
            grad = delta.grad.detach()
            norm = grad.flatten(1).norm(dim=1).clamp(min=1e-8).view(-1, 1, 1)
            delta = (delta + 0.1 * grad / norm).detach()
        optimizer.step()
        return loss

    return Script(train, (embed, model, optimizer), lambda d: (d.ints(12, 3), d.ints(4)), [embed, model])


@row("elastic weight consolidation")
def elastic_weight_consolidation():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.05)
    fisher, means = {}, {}

    def train(model, optimizer, x, y, task_ends):
        loss = F.cross_entropy(model(x), y)
        for n, p in model.named_parameters():
            if n in fisher:
                loss = loss + 5.0 * (fisher[n] * (p - means[n]) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        if task_ends:
            for n, p in model.named_parameters():
                fisher[n], means[n] = p.grad.detach().clone() ** 2, p.detach().clone()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (*xy(d), d.call == 2), [model])


@row("MAML", independent=False)
def maml_inner_loop():
    model = mlp(1, 16, 1)
    meta = Adam(model.parameters(), lr=1e-2)

    def train(model, meta, xs, ys, xq, yq):
        fast = dict(model.named_parameters())
        for _ in range(2):
            inner = F.mse_loss(torch.func.functional_call(model, fast, (xs,)), ys)
            grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {k: v - 0.1 * g for (k, v), g in zip(fast.items(), grads, strict=True)}
        loss = F.mse_loss(torch.func.functional_call(model, fast, (xq,)), yq)
        meta.zero_grad()
        loss.backward()
        meta.step()
        return loss.item()

    return Script(train, (model, meta), lambda d: (d.x(1), d.x(1), d.x(1), d.x(1)), [model])


@row("DARTS, first order")
def architecture_search_with_two_optimizers():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.ops, self.alpha = nn.ModuleList([nn.Linear(8, 4), mlp()]), nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return sum(w * op(x) for w, op in zip(F.softmax(self.alpha, 0), self.ops, strict=True))

    model = Mixed()
    w_opt, a_opt = SGD(model.ops.parameters(), lr=0.1, momentum=0.9), Adam([model.alpha], lr=1e-2)

    def train(model, w_opt, a_opt, x, y, xv, yv):
        a_opt.zero_grad()
        F.cross_entropy(model(xv), yv).backward()
        a_opt.step()
        w_opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.ops.parameters(), 5)
        w_opt.step()
        return loss

    return Script(train, (model, w_opt, a_opt), lambda d: (*xy(d), *xy(d)), [model])


@row("batch-hard triplet loss", independent=False)
def triplets_mined_in_the_batch():
    model = mlp(8, 16, 6)
    optimizer = Adam(model.parameters(), lr=1e-2)

    def train(model, optimizer, x, y):
        z = F.normalize(model(x), dim=1)
        distance = torch.cdist(z, z)
        same = y.unsqueeze(0) == y.unsqueeze(1)
        positive = (distance * same).max(1).values
        negative = (distance + 10.0 * same).min(1).values
        loss = F.relu(positive - negative + 0.3).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (d.x(8), d.ints(2)), [model])


@row("multi-task uncertainty weights (Kendall)")
def multi_task_uncertainty_weights():
    trunk, heads = mlp(8, 16, 8), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 4)])
    log_vars = nn.Parameter(torch.zeros(2))
    optimizer = Adam([*trunk.parameters(), *heads.parameters(), log_vars], lr=1e-2)

    def train(trunk, heads, log_vars, optimizer, x, y, label):
        h = torch.tanh(trunk(x))
        losses = torch.stack([F.mse_loss(heads[0](h), y), F.cross_entropy(heads[1](h), label)])
        loss = (torch.exp(-log_vars) * losses + log_vars).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return losses.tolist()

    return Script(
        train, (trunk, heads, log_vars, optimizer), lambda d: (d.x(8), d.x(1), d.ints(4)), [trunk, heads, log_vars]
    )  # fmt: skip


@row("quantisation-aware training: straight-through", independent=False)
def quantisation_aware_training():
    class QLinear(nn.Linear):
        def __init__(self, a, b):
            super().__init__(a, b)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.seen.mul_(0.9).add_(0.1 * x.detach().abs().max())
            step = self.seen / 7 + 1e-8
            x = x + (torch.round(x / step).clamp(-8, 7) * step - x).detach()
            scale = self.weight.detach().abs().max() / 7
            w = self.weight + (torch.round(self.weight / scale) * scale - self.weight).detach()
            return F.linear(x, w, self.bias)

    model = nn.Sequential(QLinear(8, 16), nn.ReLU(), QLinear(16, 4))
    optimizer = SGD(model.parameters(), lr=0.05)

    def train(model, optimizer, x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), xy, [model])
