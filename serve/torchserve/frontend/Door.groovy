import groovy.transform.CompileStatic
import io.netty.channel.Channel
import io.netty.channel.ChannelHandlerContext
import io.netty.channel.ChannelInboundHandlerAdapter
import io.netty.channel.ChannelOption

/** Stands in a listening port's pipeline and puts a `Gate` into each connection's, behind its HTTP codec. */
@CompileStatic
class Door extends ChannelInboundHandlerAdapter {
    private final Admission admission
    private final boolean inference

    Door(Admission admission, boolean inference) {
        this.admission = admission
        this.inference = inference
    }

    @Override
    void channelRead(ChannelHandlerContext context, Object connection) {
        Channel child = (Channel) connection
        // A client that shuts its sending side when it has said all still waits for the answer.
        child.config().setOption(ChannelOption.ALLOW_HALF_CLOSURE, true)
        child.pipeline().addFirst(new Installer())
        context.fireChannelRead(connection)
    }

    /** TorchServe fills the pipeline when the connection is registered, after this, and before it is active. */
    private class Installer extends ChannelInboundHandlerAdapter {
        @Override
        void channelActive(ChannelHandlerContext context) {
            // 0.12 says 0, with which closing throws away what the client has not read yet.
            context.channel().config().setOption(ChannelOption.SO_LINGER, -1)
            context.pipeline().addAfter('http', 'gate', new Gate(admission, inference))
            context.fireChannelActive()
            context.pipeline().remove(this)
        }
    }
}
